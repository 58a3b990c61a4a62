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
/* (row, head) pairs worked on together, and how many pages or vectors for that many pairs: as registers allow. */
#if defined(PL_AVX512)
#define PL_PAIRS 8
#define PL_PAGES(pairs) ((pairs) <= 2 ? 8 : (pairs) <= 4 ? 4 : 2)
#define PL_VECTORS(pairs) ((pairs) <= 4 ? 4 : 2)
#else
#define PL_PAIRS 2
#define PL_PAGES(pairs) 2
#define PL_VECTORS(pairs) 2
#endif
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
    size_t page_bytes;
    const int32_t *pages; /* of the segment */
    int bf16;
    size_t dim, padded;
    float cap;
} pl_view;

/* Scratch of one thread. */
typedef struct {
    float *queries; /* [dim][pairs] */
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

PL_INLINE vf v_load_kv(const char *p, size_t i, const int bf16)
{
    return bf16 ? v_load_bf16((const uint16_t *)p + i) : v_load((const float *)p + i);
}

PL_INLINE vf v_loadn_kv(const char *p, size_t i, size_t n, const int bf16)
{
    return bf16 ? v_loadn_bf16((const uint16_t *)p + i, n) : v_loadn((const float *)p + i, n);
}

PL_INLINE void pl_scores_tile(const int pairs, const int pages, const int bf16, const pl_view *view, size_t page,
                              const pl_desk *desk, size_t lane)
{
    const char *keys[8];
    vf acc[PL_PAIRS][8];
    for (int g = 0; g < pages; g++)
        keys[g] = view->keys + (size_t)view->pages[page + (size_t)g] * view->page_bytes;
    for (int p = 0; p < pairs; p++)
        for (int g = 0; g < pages; g++)
            acc[p][g] = v_zero();
    const float *query = desk->queries;
    for (size_t d = 0; d < view->dim; d++, query += PL_PAIRS) {
        vf key[8];
        for (int g = 0; g < pages; g++)
            key[g] = v_load_kv(keys[g], d * PL_PAGE, bf16);
        for (int p = 0; p < pairs; p++) {
            vf q = v_set1(query[p]);
            for (int g = 0; g < pages; g++)
                acc[p][g] = v_fma(q, key[g], acc[p][g]);
        }
    }
    for (int p = 0; p < pairs; p++)
        for (int g = 0; g < pages; g++)
            v_store(desk->scores + (size_t)p * PL_SPAN + lane + (size_t)g * PL_PAGE, acc[p][g]);
}

PL_INLINE void pl_scores(const int pairs, const int bf16, const pl_view *view, size_t base, size_t from, size_t to,
                         const pl_desk *desk)
{
    const int wide = PL_PAGES(pairs);
    size_t lane = from / PL_PAGE * PL_PAGE;
    for (; lane + (size_t)(wide - 1) * PL_PAGE < to; lane += (size_t)wide * PL_PAGE)
        pl_scores_tile(pairs, wide, bf16, view, (base + lane) / PL_PAGE, desk, lane);
    for (; lane < to; lane += PL_PAGE)
        pl_scores_tile(pairs, 1, bf16, view, (base + lane) / PL_PAGE, desk, lane);
}

/* o of `pairs` pairs in `vectors` x 16 dimensions from `at` on: one chain over the lanes from .. to - 1. */
PL_INLINE void pl_values_tile(const int pairs, const int vectors, const int tail, const int bf16,
                              const pl_view *view, size_t base, size_t from, size_t to, size_t at,
                              const pl_desk *desk, float *const *out)
{
    vf acc[PL_PAIRS][4];
    for (int p = 0; p < pairs; p++)
        for (int v = 0; v < vectors; v++)
            acc[p][v] = v_zero();
    for (size_t lane = from; lane < to;) {
        size_t key = base + lane, slot = key % PL_PAGE, stop = lane - slot + PL_PAGE;
        const char *page = view->values + (size_t)view->pages[key / PL_PAGE] * view->page_bytes;
        stop = stop < to ? stop : to;
        for (; lane < stop; lane++, slot++) {
            vf value[4];
            for (int v = 0; v < vectors; v++) {
                size_t i = slot * view->dim + at + (size_t)v * PL_LANES;
                value[v] = tail ? v_loadn_kv(page, i, view->dim - at, bf16) : v_load_kv(page, i, bf16);
            }
            for (int p = 0; p < pairs; p++) {
                vf weight = v_set1(desk->scores[(size_t)p * PL_SPAN + lane]);
                for (int v = 0; v < vectors; v++)
                    acc[p][v] = v_fma(weight, value[v], acc[p][v]);
            }
        }
    }
    for (int p = 0; p < pairs; p++)
        for (int v = 0; v < vectors; v++)
            v_store(out[p] + at + (size_t)v * PL_LANES, acc[p][v]);
}

PL_INLINE void pl_values(const int pairs, const int bf16, const pl_view *view, size_t base, size_t from, size_t to,
                         const pl_desk *desk, float *const *out)
{
    const int wide = PL_VECTORS(pairs);
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

PL_INLINE void pl_chunk_pairs(const int pairs, const int bf16, const pl_view *view, size_t base, size_t from,
                              size_t to, const pl_span *const *spans, const pl_desk *desk, float *const *out)
{
    pl_scores(pairs, bf16, view, base, from, to, desk);
    for (int p = 0; p < pairs; p++)
        pl_softmax(desk->scores + (size_t)p * PL_SPAN, spans[p], from, to, view->cap, out[p] + view->padded,
                   out[p] + view->padded + 1);
    pl_values(pairs, bf16, view, base, from, to, desk, out);
}

/* One chunk of up to PL_PAIRS pairs: out[p] gets o, m, l. */
static void pl_chunk(int pairs, const pl_view *view, size_t base, const pl_span *const *spans, const pl_desk *desk,
                     float *const *out)
{
    size_t from = PL_SPAN, to = 0;
    for (int p = 0; p < pairs; p++) {
        from = (size_t)spans[p]->lo < from ? (size_t)spans[p]->lo : from;
        to = (size_t)spans[p]->end > to ? (size_t)spans[p]->end : to;
    }
    switch (pairs + (view->bf16 ? 8 : 0)) {
#define PL_CASE(n) \
    case n: pl_chunk_pairs(n, 0, view, base, from, to, spans, desk, out); break; \
    case n + 8: pl_chunk_pairs(n, 1, view, base, from, to, spans, desk, out); break;
        PL_CASE(1)
        PL_CASE(2)
#if PL_PAIRS == 8
        PL_CASE(3)
        PL_CASE(4)
        PL_CASE(5)
        PL_CASE(6)
        PL_CASE(7)
        PL_CASE(8)
#endif
#undef PL_CASE
    default: break;
    }
}

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
