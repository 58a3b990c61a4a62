/* Attention of rows over their own paths (paged keys, then the visible rows of a tree).
 *
 * A path is walked in chunks of PL_CHUNK path indices, counted from its start. A chunk gives its largest score m,
 * the sum l of e^(s - m), and the sum o of e^(s - m) v; chunks are merged in order. Rows and heads that read the
 * same keys share the loads, never the arithmetic:
 *   - a score is one chain of additions over the head's dimensions (a lane is a key, its place does not matter);
 *   - l is summed in 16 lanes by path index, then by a fixed tree;
 *   - o is one chain over the path. Keys stand in storage in the order of the path, with rows of other branches
 *     between them; these have weight 0, and adding 0 changes nothing.
 * So the result depends on the path alone. */
#ifndef PL_ATTENTION_H
#define PL_ATTENTION_H

#include "rows.h"

#define PL_CHUNK 128
#define PL_SPAN (PL_CHUNK + 64) /* lanes of storage that a chunk may reach into: its keys and a whole tree */
#define PL_PAIRS PL_ROWS        /* (row, head) pairs worked on together */
/* Pages, or vectors of a value, that go together with that many pairs: as registers allow. */
#if defined(PL_AVX512)
#define PL_WIDE(pairs) ((pairs) <= 4 ? 4 : 2)
#else
#define PL_WIDE(pairs) ((pairs) <= 3 ? 2 : 1)
#endif
#define PL_QUERY (PL_MAX_DIM + 16) /* a known distance costs no register; not a power of two, for the cache's sake */
#define PL_BLOCK 16             /* rows of a segment that make one unit of work */

/* The part of a chunk that a row sees; lanes are counted from the chunk's first path index. */
typedef struct {
    int lo, hi;     /* path lanes lo .. hi - 1 */
    int end;        /* one past its last lane of storage */
    int first;      /* path lane of the first tree row in `tree` */
    int root;       /* storage lane of row 0 of the tree; may be negative */
    uint64_t tree;  /* its tree rows in this chunk; 0 where storage order is path order */
} pl_span;

typedef struct {
    const char *keys, *values; /* of the group, at layer and key head */
    ptrdiff_t page_bytes;
    const int32_t *pages; /* of the segment */
    size_t limit;         /* how many of them there are */
    int bf16;
    size_t dim, padded;
    float cap;
} pl_view;

/* Scratch of one thread. */
typedef struct {
    float *queries; /* [pairs][PL_QUERY] */
    float *scores;  /* [pairs][PL_SPAN] */
    float *part;    /* [pairs][padded + 16]: o, m, l */
    float *sums;    /* [PL_BLOCK * group][padded + 16] */
} pl_desk;

static pl_span pl_span_of(const pl_batch *batch, size_t row, int window, int chunk)
{
    int base = chunk * PL_CHUNK, length = batch->positions[row] + 1, context = batch->context[row];
    uint64_t visible = (uint64_t)batch->visible[row];
    int from = window > 0 && length > window ? length - window : 0;
    int lo = from > base ? from : base, hi = length < base + PL_CHUNK ? length : base + PL_CHUNK;
    pl_span span = {lo - base, hi - base, hi - base, 0, context - base, 0};
    if (hi <= lo || hi <= context || (visible & (visible + 1)) == 0)
        return span;
    int start = lo > context ? lo : context;
    span.first = start - base;
    for (int skip = start - context; skip > 0; skip--)
        visible &= visible - 1;
    for (int left = hi - start; left > 0; left--) {
        uint64_t bit = visible & -visible;
        span.tree |= bit;
        visible ^= bit;
    }
    span.end = span.root + 64 - __builtin_clzll(span.tree);
    return span;
}

PL_INLINE vf v_load_kv(const char *p, ptrdiff_t i, const int bf16)
{
    return bf16 ? v_load_bf16((const uint16_t *)p + i) : v_load((const float *)p + i);
}

PL_INLINE vf v_loadn_kv(const char *p, size_t i, size_t n, const int bf16)
{
    return bf16 ? v_loadn_bf16((const uint16_t *)p + i, n) : v_loadn((const float *)p + i, n);
}

/* Scores of `pages` (1, 2 or 4) pages from `page` on. */
PL_INLINE void pl_scores_tile(const int pairs, const int pages, const int bf16, const pl_view *view, size_t page,
                              const pl_desk *desk, size_t lane)
{
    const int32_t *at = view->pages + page;
    const char *k0 = view->keys + at[0] * view->page_bytes, *k1 = k0, *k2 = k0, *k3 = k0;
    if (pages > 1)
        k1 = view->keys + at[1] * view->page_bytes;
    if (pages > 2) {
        k2 = view->keys + at[2] * view->page_bytes;
        k3 = view->keys + at[3] * view->page_bytes;
    }
    const float *query = desk->queries;
    const ptrdiff_t ahead = view->values - view->keys, line = PL_PAGE * (bf16 ? 2 : 4);
    float *scores = desk->scores + lane;
    const vf zero = v_zero();
#define PL_ZERO(p) vf a##p = zero, b##p = zero, c##p = zero, d##p = zero;
    PL_EIGHT(PL_ZERO)
#undef PL_ZERO
    for (ptrdiff_t i = 0; i < (ptrdiff_t)view->dim; i++, query++) {
        vf v0 = v_load_kv(k0, i * PL_PAGE, bf16), v1 = v0, v2 = v0, v3 = v0;
        if (pages > 1)
            v1 = v_load_kv(k1, i * PL_PAGE, bf16);
        if (pages > 2)
            v2 = v_load_kv(k2, i * PL_PAGE, bf16), v3 = v_load_kv(k3, i * PL_PAGE, bf16);
        PL_FETCH(k0 + ahead + i * line); /* the values of these keys, which come next */
        if (pages > 1)
            PL_FETCH(k1 + ahead + i * line);
        if (pages > 2) {
            PL_FETCH(k2 + ahead + i * line);
            PL_FETCH(k3 + ahead + i * line);
        }
#define PL_ADD_PAIR(p) \
    if (p < pairs) { \
        vf q = v_set1(query[p * PL_QUERY]); \
        a##p = v_fma(q, v0, a##p); \
        if (pages > 1) \
            b##p = v_fma(q, v1, b##p); \
        if (pages > 2) { \
            c##p = v_fma(q, v2, c##p); \
            d##p = v_fma(q, v3, d##p); \
        } \
    }
        PL_EIGHT(PL_ADD_PAIR)
#undef PL_ADD_PAIR
    }
#define PL_KEEP(p) \
    if (p < pairs) { \
        v_store(scores + p * PL_SPAN, a##p); \
        if (pages > 1) \
            v_store(scores + p * PL_SPAN + PL_PAGE, b##p); \
        if (pages > 2) { \
            v_store(scores + p * PL_SPAN + 2 * PL_PAGE, c##p); \
            v_store(scores + p * PL_SPAN + 3 * PL_PAGE, d##p); \
        } \
    }
    PL_EIGHT(PL_KEEP)
#undef PL_KEEP
}

PL_INLINE void pl_scores(const int pairs, const int bf16, const pl_view *view, size_t base, size_t from, size_t to,
                         const pl_desk *desk)
{
    const int wide = PL_WIDE(pairs);
    size_t lane = from / PL_PAGE * PL_PAGE;
    for (; lane + (size_t)(wide - 1) * PL_PAGE < to; lane += (size_t)wide * PL_PAGE)
        pl_scores_tile(pairs, wide, bf16, view, (base + lane) / PL_PAGE, desk, lane);
    for (; lane < to; lane += PL_PAGE)
        pl_scores_tile(pairs, 1, bf16, view, (base + lane) / PL_PAGE, desk, lane);
}

/* o of `pairs` pairs in `vectors` (1, 2 or 4) x 16 dimensions from `at` on: one chain over the lanes from .. to - 1.
 * With `tail` only the last view->dim - at dimensions are there. */
PL_INLINE void pl_values_tile(const int pairs, const int vectors, const int tail, const int bf16,
                              const pl_view *view, size_t base, size_t from, size_t to, size_t at,
                              const pl_desk *desk, float *const *out)
{
    const vf zero = v_zero();
#define PL_ZERO(p) vf a##p = zero, b##p = zero, c##p = zero, d##p = zero;
    PL_EIGHT(PL_ZERO)
#undef PL_ZERO
    for (size_t lane = from; lane < to;) {
        size_t key = base + lane, slot = key % PL_PAGE, stop = lane - slot + PL_PAGE;
        const char *page = view->values + view->pages[key / PL_PAGE] * view->page_bytes;
        const size_t later = key / PL_PAGE + PL_CHUNK / PL_PAGE;
        const char *next = later < view->limit ? view->keys + view->pages[later] * view->page_bytes : page;
        stop = stop < to ? stop : to;
        for (; lane < stop; lane++, slot++) {
            size_t i = slot * view->dim + at;
            const float *weight = desk->scores + lane;
            for (int v = 0; v < vectors; v += bf16 ? 2 : 1) /* the keys of the next chunk */
                PL_FETCH(next + (i + (size_t)v * PL_LANES) * (bf16 ? 2 : 4));
            vf v0 = tail ? v_loadn_kv(page, i, view->dim - at, bf16) : v_load_kv(page, i, bf16);
            vf v1 = v0, v2 = v0, v3 = v0;
            if (vectors > 1)
                v1 = v_load_kv(page, i + PL_LANES, bf16);
            if (vectors > 2)
                v2 = v_load_kv(page, i + 2 * PL_LANES, bf16), v3 = v_load_kv(page, i + 3 * PL_LANES, bf16);
#define PL_ADD_PAIR(p) \
    if (p < pairs) { \
        vf w = v_set1(weight[p * PL_SPAN]); \
        a##p = v_fma(w, v0, a##p); \
        if (vectors > 1) \
            b##p = v_fma(w, v1, b##p); \
        if (vectors > 2) { \
            c##p = v_fma(w, v2, c##p); \
            d##p = v_fma(w, v3, d##p); \
        } \
    }
            PL_EIGHT(PL_ADD_PAIR)
#undef PL_ADD_PAIR
        }
    }
#define PL_KEEP(p) \
    if (p < pairs) { \
        v_store(out[p] + at, a##p); \
        if (vectors > 1) \
            v_store(out[p] + at + PL_LANES, b##p); \
        if (vectors > 2) { \
            v_store(out[p] + at + 2 * PL_LANES, c##p); \
            v_store(out[p] + at + 3 * PL_LANES, d##p); \
        } \
    }
    PL_EIGHT(PL_KEEP)
#undef PL_KEEP
}

PL_INLINE void pl_values(const int pairs, const int bf16, const pl_view *view, size_t base, size_t from, size_t to,
                         const pl_desk *desk, float *const *out)
{
    const int wide = PL_WIDE(pairs);
    size_t at = 0;
    for (; at + (size_t)wide * PL_LANES <= view->dim; at += (size_t)wide * PL_LANES)
        pl_values_tile(pairs, wide, 0, bf16, view, base, from, to, at, desk, out);
    for (; at + PL_LANES <= view->dim; at += PL_LANES)
        pl_values_tile(pairs, 1, 0, bf16, view, base, from, to, at, desk, out);
    if (at < view->dim)
        pl_values_tile(pairs, 1, 1, bf16, view, base, from, to, at, desk, out);
}

/* Scores of one pair become weights; the lanes from .. to - 1 that the row does not see get weight 0. */
static void pl_softmax(float *s, const pl_span *span, size_t from, size_t to, float cap, float *m, float *l)
{
    size_t lo = (size_t)span->lo, hi = (size_t)span->hi, start = lo / PL_LANES * PL_LANES;
    size_t stop = pl_round_up(hi, PL_LANES), tree = 0, lanes[64];
    for (uint64_t left = span->tree; left; left &= left - 1) { /* gather: the target never passes the source */
        lanes[tree] = (size_t)(span->root + __builtin_ctzll(left));
        s[(size_t)span->first + tree] = s[lanes[tree]];
        tree++;
    }
    if (cap > 0.0f)
        for (size_t i = start; i < stop; i += PL_LANES)
            v_store(s + i, pl_cap(v_load(s + i), cap));
    for (size_t i = start; i < lo; i++)
        s[i] = -INFINITY;
    for (size_t i = hi; i < stop; i++)
        s[i] = -INFINITY;
    vf top = v_load(s + start), sum = v_zero();
    for (size_t i = start + PL_LANES; i < stop; i += PL_LANES)
        top = v_max(top, v_load(s + i));
    *m = v_hmax(top);
    top = v_set1(*m);
    for (size_t i = start; i < stop; i += PL_LANES) {
        vf weight = v_exp(v_sub(v_load(s + i), top));
        v_store(s + i, weight);
        sum = v_add(sum, weight);
    }
    *l = v_hsum(sum);
    if (from < start)
        pl_clear(s, from, start);
    if (stop < to)
        pl_clear(s, stop, to);
    for (; tree > 0; tree--) { /* scatter, from the last to the first */
        float weight = s[(size_t)span->first + tree - 1];
        s[(size_t)span->first + tree - 1] = 0.0f;
        s[lanes[tree - 1]] = weight;
    }
}

typedef void (*pl_score_pairs)(const pl_view *, size_t base, size_t from, size_t to, const pl_desk *);
typedef void (*pl_value_pairs)(const pl_view *, size_t base, size_t from, size_t to, const pl_desk *, float *const *);

#define PL_ONE_KIND(pairs, bf16) \
    PL_NOINLINE void pl_scores_##pairs##_##bf16(const pl_view *view, size_t base, size_t from, size_t to, \
                                                const pl_desk *desk) \
    { \
        pl_scores(pairs, bf16, view, base, from, to, desk); \
    } \
    PL_NOINLINE void pl_values_##pairs##_##bf16(const pl_view *view, size_t base, size_t from, size_t to, \
                                                const pl_desk *desk, float *const *out) \
    { \
        pl_values(pairs, bf16, view, base, from, to, desk, out); \
    }
#define PL_BOTH_KINDS(pairs, unused) PL_ONE_KIND(pairs, 0) PL_ONE_KIND(pairs, 1)
#define PL_ENTRY(pairs, what, bf16) pl_##what##_##pairs##_##bf16,
PL_NUMBERS(PL_BOTH_KINDS, 0)

/* One chunk of up to PL_PAIRS pairs: out[p] gets o, m, l. */
static void pl_chunk(int pairs, const pl_view *view, size_t base, const pl_span *const *spans, const pl_desk *desk,
                     float *const *out)
{
    static const pl_score_pairs scores[2][PL_PAIRS] = {{PL_NUMBERS(PL_ENTRY, scores, 0)},
                                                       {PL_NUMBERS(PL_ENTRY, scores, 1)}};
    static const pl_value_pairs values[2][PL_PAIRS] = {{PL_NUMBERS(PL_ENTRY, values, 0)},
                                                       {PL_NUMBERS(PL_ENTRY, values, 1)}};
    size_t from = PL_SPAN, to = 0;
    for (int p = 0; p < pairs; p++) {
        from = (size_t)spans[p]->lo < from ? (size_t)spans[p]->lo : from;
        to = (size_t)spans[p]->end > to ? (size_t)spans[p]->end : to;
    }
    scores[view->bf16][pairs - 1](view, base, from, to, desk);
    for (int p = 0; p < pairs; p++)
        pl_softmax(desk->scores + (size_t)p * PL_SPAN, spans[p], from, to, view->cap, out[p] + view->padded,
                   out[p] + view->padded + 1);
    values[view->bf16][pairs - 1](view, base, from, to, desk, out);
}
#undef PL_ONE_KIND
#undef PL_BOTH_KINDS
#undef PL_ENTRY

/* sum (o, m, l) takes in the next chunk. */
static void pl_merge(float *sum, const float *part, size_t padded, int first)
{
    if (first) {
        memcpy(sum, part, (padded + 2) * sizeof(float));
        return;
    }
    float *m = sum + padded, *l = m + 1;
    const float *pm = part + padded, *pl = pm + 1;
    float top = *m > *pm ? *m : *pm, scale[PL_LANES] = {*m - top, *pm - top};
    v_store(scale, v_exp(v_load(scale)));
    for (size_t i = 0; i < padded; i += PL_LANES) {
        vf x = v_mul(v_load(part + i), v_set1(scale[1]));
        v_store(sum + i, v_fma(v_load(sum + i), v_set1(scale[0]), x));
    }
    *l = *l * scale[0] + *pl * scale[1];
    *m = top;
}

/* out[0 .. dim - 1] = o / l */
static void pl_finish(const float *sum, size_t dim, size_t padded, float *out)
{
    vf inverse = v_set1(1.0f / sum[padded + 1]);
    for (size_t i = 0; i < dim; i += PL_LANES)
        v_storen(out + i, v_mul(v_load(sum + i), inverse), dim - i);
}

#endif
