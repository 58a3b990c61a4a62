/* One row of logits and the noise of one position give one token. paceline/draw.py is the specification, and every
 * token drawn here is the one drawn there: whatever decides is computed by the same IEEE operations in the same
 * order. What is only a bound (which tokens could still win, where to look for candidates) may be rough. */
#include "compile.h"

#include "cpu.h"
#include "race.h"

#include <stdlib.h>

static const double SLACK = 1.001; /* far more than the float32 bounds below are off */

/* (x - top) / temperature + Gumbel noise */
static double score(float x, float top, double scale, uint64_t key, int64_t id)
{
    return ((double)x - (double)top) * scale + gumbel(key, id);
}

/* The token of highest score among those up to last; best is the place of the highest logit. Noise is worked out
 * where a token could still win alone: with u its uniform number and E = -log u >= 1 - u, its score, (x - top) * scale
 * - log E, beats the best so far only if 1 - u <= exp((x - top) * scale - score). */
INLINE int64_t find_winner(const float *x, int64_t n, float top, double scale, uint64_t last, uint64_t key,
                           int64_t best)
{
    const float lowest = logit_of(last), float_scale = (float)scale;
    double high = score(top, top, scale, key, best);
    uint64_t step[BLOCK];
    for (int j = 0; j < BLOCK; j++)
        step[j] = GOLDEN * (uint64_t)(j + 1);
    for (int64_t i = 0; i < n; i += BLOCK) {
        int32_t could[BLOCK], any = 0;
        float bound = (float)(exp(-high) * SLACK * 0x1p31);
        float least = (float)((double)top + (high - HIGHEST_NOISE) / scale);
        least = least > lowest ? least : lowest;
        int64_t count = least_of(n - i, BLOCK);
        for (int64_t j = 0; j < count; j++)
            any |= x[i + j] >= least;
        if (!any)
            continue;
        uint64_t base = key + GOLDEN * (uint64_t)i;
        any = 0;
        for (int64_t j = 0; j < count; j++) {
            float rest = (float)(int32_t)(~mix(base + step[j]) >> 33);
            could[j] = (x[i + j] >= least) & (rest <= weigh(x[i + j], top, float_scale) * bound);
            any |= could[j];
        }
        for (int64_t j = 0; any && j < count; j++) {
            if (!could[j] || rank_of(x[i + j], i + j) > last)
                continue;
            double value = score(x[i + j], top, scale, key, i + j);
            if (value > high || (value == high && i + j < best)) {
                high = value;
                best = i + j;
            }
        }
    }
    return best;
}

INLINE int64_t draw_row(const float *x, int64_t n, const pl_filter *f, uint64_t key, item *room)
{
    float top;
    int64_t best = find_top(x, n, &top);
    if (best < 0)
        return best;
    list l = {room, NULL, 0};
    return find_winner(x, n, top, f->scale, find_last(&l, x, n, top, f), key, best);
}

INLINE int64_t report_row(const float *x, int64_t n, int64_t token, int64_t k, item *room, pl_report *out,
                          int64_t *ids)
{
    int64_t before = 0, best = find_top(x, n, &out->top);
    if (best < 0)
        return best;
    out->total = band_mass(x, n, out->top, 1.0f, -FLT_MAX, INFINITY);
    for (int64_t i = 0; i < n; i++)
        before += x[i] > x[token];
    for (int64_t i = 0; i < token; i++)
        before += x[i] == x[token];
    out->rank = before + 1;
    list l = {room, NULL, 0};
    collect_first(&l, x, n, out->top, 1.0, -FLT_MAX, k);
    qsort(l.items, (size_t)l.count, sizeof(item), by_rank);
    for (int64_t i = 0; i < l.count; i++)
        ids[i] = id_of(l.items[i].rank);
    out->listed = l.count;
    return best;
}

#define PATH(NAME, TARGET)                                                                                       \
    TARGET static int64_t top_##NAME(const float *x, int64_t n)                                                  \
    {                                                                                                            \
        float top;                                                                                               \
        return find_top(x, n, &top);                                                                             \
    }                                                                                                            \
    TARGET static int64_t draw_##NAME(const float *x, int64_t n, const pl_filter *f, uint64_t key, item *room)   \
    {                                                                                                            \
        return draw_row(x, n, f, key, room);                                                                     \
    }                                                                                                            \
    TARGET static int64_t report_##NAME(const float *x, int64_t n, int64_t token, int64_t k, item *room,         \
                                        pl_report *report, int64_t *ids)                                         \
    {                                                                                                            \
        return report_row(x, n, token, k, room, report, ids);                                                    \
    }                                                                                                            \
    TARGET static int64_t children_##NAME(const float *x, int64_t n, const int64_t *ids, const pl_filter *f,     \
                                          uint64_t key, item *room, winners *found)                              \
    {                                                                                                            \
        return f ? sampled_children(x, n, ids, f, key, room, found) : greedy_children(x, n, ids, room, found);   \
    }                                                                                                            \
    TARGET static void first_##NAME(const float *x, int64_t n, item *room, winners *found)                       \
    {                                                                                                            \
        float top;                                                                                               \
        find_first(x, n, NULL, room, found, &top);                                                               \
    }                                                                                                            \
    TARGET static int64_t shares_##NAME(const float *x, int64_t n, const pl_filter *f, item *room, double *out)  \
    {                                                                                                            \
        return shares_row(x, n, f, room, out);                                                                   \
    }                                                                                                            \
    TARGET static int64_t processed_##NAME(const float *x, int64_t n, const pl_filter *f, item *room, float *out) \
    {                                                                                                            \
        return processed_row(x, n, f, room, out);                                                                \
    }                                                                                                            \
    TARGET static void race_##NAME(const double *q, int64_t n, uint64_t key, item *room, winners *found)         \
    {                                                                                                            \
        race_row(q, n, key, room, found);                                                                        \
    }

PATH(portable, )
#if defined(__x86_64__)
PATH(avx2, __attribute__((target("avx2"))))
PATH(avx512, __attribute__((target(AVX512))))
#endif
#undef PATH

#if defined(__x86_64__)
#define CHOOSE(path, name) ((path) == 2 ? name##_avx512 : (path) == 1 ? name##_avx2 : name##_portable)
#else
#define CHOOSE(path, name) ((void)(path), name##_portable)
#endif

int32_t pl_sample_path(void)
{
#if defined(__x86_64__)
    const int cpu = pl_cpu();
    return cpu >= PL_CPU_AVX512 ? 2 : cpu >= PL_CPU_AVX2 ? 1 : 0;
#else
    return 0;
#endif
}

void pl_argmax(int32_t path, const float *x, int64_t rows, int64_t stride, int64_t n, int64_t *out)
{
    for (int64_t i = 0; i < rows; i++)
        out[i] = CHOOSE(path, top)(x + i * stride, n);
}

void pl_draw(int32_t path, const float *x, int64_t rows, int64_t stride, int64_t n, const pl_filter *filter,
             const uint64_t *keys, pl_candidate *room, int64_t *out)
{
    for (int64_t i = 0; i < rows; i++)
        out[i] = CHOOSE(path, draw)(x + i * stride, n, filter, keys[i], room);
}

int64_t pl_logprobs(int32_t path, const float *x, int64_t n, int64_t token, int64_t k, pl_candidate *room,
                    pl_report *report, int64_t *ids)
{
    return CHOOSE(path, report)(x, n, token, k, room, report, ids);
}

void pl_uniforms(uint64_t key, const int64_t *ids, int64_t n, double *out)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = uniform(key, ids[i]);
}

void pl_children(int32_t path, const float *x, int64_t rows, int64_t stride, int64_t n, const int64_t *ids,
                 const pl_filter *filter, const uint64_t *keys, int64_t count, pl_candidate *room, int64_t *tokens,
                 double *chances, int64_t *found)
{
    for (int64_t i = 0; i < rows; i++) {
        winners first = {chances + i * count, tokens + i * count, 0, count};
        const int64_t state = CHOOSE(path, children)(x + i * stride, n, ids, filter, keys[i], room, &first);
        found[i] = state < 0 ? state : first.count;
    }
}

int64_t pl_top(int32_t path, const float *x, int64_t rows, int64_t stride, int64_t n, int64_t count,
               pl_candidate *room, double *scores, int64_t *out)
{
    for (int64_t i = 0; i < rows; i++) {
        winners found = {scores, out + i * count, 0, count};
        CHOOSE(path, first)(x + i * stride, n, room, &found);
        if (found.count < count)
            return i;
    }
    return rows;
}

int64_t pl_shares(int32_t path, const float *x, int64_t n, const pl_filter *filter, pl_candidate *room, double *out)
{
    return CHOOSE(path, shares)(x, n, filter, room, out);
}

int64_t pl_processed(int32_t path, const float *x, int64_t n, const pl_filter *filter, pl_candidate *room, float *out)
{
    return CHOOSE(path, processed)(x, n, filter, room, out);
}

int64_t pl_race(int32_t path, const double *q, int64_t n, uint64_t key, int64_t count, pl_candidate *room,
                int64_t *tokens, double *scores)
{
    winners found = {scores, tokens, 0, count};
    CHOOSE(path, race)(q, n, key, room, &found);
    return found.count;
}
