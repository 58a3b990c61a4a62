/* The race of draw.py: every token that the filters keep runs with its log-probability + noise; the first few win. */
#ifndef PL_RACE_H
#define PL_RACE_H

#include "noise.h"
#include "select.h"

enum { GROUPS = 256, LANES = 8 };

typedef struct {
    double *scores;
    int64_t *ids;
    int64_t count;
} field;

/* The highest scores so far, in falling order, among equal ones the lowest id first. */
typedef struct {
    double *scores;
    int64_t *ids;
    int64_t count, wanted;
} winners;

INLINE field field_in(item *room, int64_t n) { return (field){(double *)(void *)room, (int64_t *)(void *)room + n, 0}; }

/* Enter the columns from start to end whose tokens rank up to the last, their logits as scores. */
INLINE void enter(field *f, const float *x, int64_t start, int64_t end, const int64_t *ids, uint64_t last)
{
    const float lowest = logit_of(last);
    for (int64_t i = start; i < end; i += BLOCK) {
        int64_t stop = least_of(end, i + BLOCK);
        int32_t any = 0;
        for (int64_t j = i; j < stop; j++)
            any |= x[j] >= lowest;
        for (int64_t j = i; any && j < stop; j++) {
            int64_t id = id_at(ids, j);
            f->scores[f->count] = x[j];
            f->ids[f->count] = id;
            f->count += rank_of(x[j], id) <= last;
        }
    }
}

/* Take a token among the winners if it is one: an insertion sort, since few are wanted and few get here. */
static void insert(winners *w, double score, int64_t id)
{
    int64_t i = w->count;
    if (i == w->wanted) {
        if (i == 0 || w->scores[i - 1] > score || (w->scores[i - 1] == score && w->ids[i - 1] < id))
            return;
        i--;
    } else {
        w->count++;
    }
    for (; i > 0 && (w->scores[i - 1] < score || (w->scores[i - 1] == score && w->ids[i - 1] > id)); i--) {
        w->scores[i] = w->scores[i - 1];
        w->ids[i] = w->ids[i - 1];
    }
    w->scores[i] = score;
    w->ids[i] = id;
}

/* Groups of so many that there are at most GROUPS of them. */
INLINE int64_t group_size(int64_t n)
{
    int64_t size = (n + GROUPS - 1) / GROUPS;
    return size > LANES ? size : LANES;
}

/* A bound that at least count scores reach, given the highest of each group: the count-th of those. */
static double bound_of(const double *tops, int64_t groups, int64_t count)
{
    double scores[GROUPS];
    int64_t ids[GROUPS];
    winners w = {scores, ids, 0, count};
    if (count > groups || count < 1)
        return -INFINITY;
    for (int64_t i = 0; i < groups; i++)
        insert(&w, tops[i], i);
    return scores[count - 1];
}

INLINE double top_score(const double *scores, int64_t n)
{
    double high[LANES], top = -INFINITY;
    int64_t i = 0;
    for (int j = 0; j < LANES; j++)
        high[j] = -INFINITY;
    for (; i + LANES <= n; i += LANES)
        for (int j = 0; j < LANES; j++)
            high[j] = scores[i + j] > high[j] ? scores[i + j] : high[j];
    for (; i < n; i++)
        top = scores[i] > top ? scores[i] : top;
    for (int j = 0; j < LANES; j++)
        top = high[j] > top ? high[j] : top;
    return top;
}

/* Find the winners of a field. */
INLINE void finish(const field *f, winners *w)
{
    const int64_t size = group_size(f->count), groups = (f->count + size - 1) / size;
    double tops[GROUPS];
    for (int64_t g = 0; g < groups; g++)
        tops[g] = top_score(f->scores + g * size, least_of(f->count - g * size, size));
    double bound = bound_of(tops, groups, w->wanted);
    for (int64_t g = 0; g < groups; g++) {
        if (tops[g] < bound)
            continue;
        for (int64_t i = g * size, end = least_of(f->count, i + size); i < end; i++) {
            if (f->scores[i] < bound)
                continue;
            insert(w, f->scores[i], f->ids[i]);
            if (w->count == w->wanted && w->count)
                bound = w->scores[w->count - 1];
        }
    }
}

/* The mass of scores, each exp(score - top). */
INLINE int64_t score_mass(const double *scores, int64_t n, double top)
{
    float weights[WIDE];
    int64_t total = 0;
    for (int64_t i = 0; i < n; i += WIDE) {
        int64_t count = least_of(n - i, WIDE);
        for (int64_t j = 0; j < count; j++)
            weights[j] = weigh((float)(scores[i + j] - top), 0.0f, 1.0f) * GRID;
        for (int64_t j = 0; j < count; j++)
            total += nearest(weights[j]);
    }
    return total;
}

/* Enter the tokens that the filter keeps, their scores (x - top) / temperature; returns what is wrong with the row. */
INLINE int64_t enter_kept(field *f, const float *x, int64_t n, const int64_t *ids, const pl_filter *filter, item *room)
{
    float top;
    const int64_t best = find_top(x, n, &top);
    if (best < 0)
        return best;
    list l = {room, ids, 0};
    const uint64_t last = find_last(&l, x, n, top, filter);
    enter(f, x, 0, n, ids, last);
    const double high = (double)top, scale = filter->scale;
    for (int64_t i = 0; i < f->count; i++)
        f->scores[i] = (f->scores[i] - high) * scale;
    return 0;
}

INLINE int64_t sampled_children(const float *x, int64_t n, const int64_t *ids, const pl_filter *filter, uint64_t key,
                                item *room, winners *w)
{
    field f = field_in(room, n);
    const int64_t state = enter_kept(&f, x, n, ids, filter, room);
    if (state)
        return state;
    for (int64_t i = 0; i < f.count; i++)
        f.scores[i] += gumbel(key, f.ids[i]);
    finish(&f, w);
    const double first = top_score(f.scores, f.count), total = (double)score_mass(f.scores, f.count, first);
    for (int64_t i = 0; i < w->count; i++)
        w->scores[i] = (double)mass((float)(w->scores[i] - first), 0.0f, 1.0f) / total;
    return 0;
}

/* The winners by logit alone. Only groups of columns whose highest is among the highest are looked at twice. */
INLINE int64_t find_first(const float *x, int64_t n, const int64_t *ids, item *room, winners *w, float *top)
{
    const int64_t size = group_size(n), groups = (n + size - 1) / size;
    int32_t low = INT32_MAX, high = INT32_MIN;
    double tops[GROUPS];
    for (int64_t g = 0; g < groups; g++) {
        int32_t value = highest(x + g * size, least_of(n - g * size, size), &low);
        high = value > high ? value : high;
        tops[g] = (double)unordered(value);
    }
    const int64_t state = wrong(high, low);
    if (state)
        return state;
    const double bound = bound_of(tops, groups, w->wanted);
    const uint64_t last = rank_of(bound > -FLT_MAX ? (float)bound : -FLT_MAX, UINT32_MAX);
    field f = field_in(room, n);
    for (int64_t g = 0; g < groups; g++)
        if (tops[g] >= bound)
            enter(&f, x, g * size, least_of(n, (g + 1) * size), ids, last);
    finish(&f, w);
    *top = unordered(high);
    return 0;
}

INLINE int64_t greedy_children(const float *x, int64_t n, const int64_t *ids, item *room, winners *w)
{
    float top;
    const int64_t state = find_first(x, n, ids, room, w, &top);
    if (state)
        return state;
    const int64_t total = band_mass(x, n, top, 1.0f, -FLT_MAX, INFINITY);
    for (int64_t i = 0; i < w->count; i++)
        w->scores[i] = (double)mass((float)w->scores[i], top, 1.0f) / (double)total;
    return 0;
}

/* Probabilities; their sum is made of LANES sums, each in the order of ids. */
INLINE int64_t shares_row(const float *x, int64_t n, const pl_filter *filter, item *room, double *out)
{
    field f = field_in(room, n);
    const int64_t state = enter_kept(&f, x, n, NULL, filter, room);
    if (state)
        return state;
    double sums[LANES] = {0}, total = 0.0;
    int64_t i = 0;
    for (; i < f.count; i++)
        f.scores[i] = exponential(f.scores[i]);
    for (i = 0; i + LANES <= f.count; i += LANES)
        for (int j = 0; j < LANES; j++)
            sums[j] += f.scores[i + j];
    for (int j = 0; i + j < f.count; j++)
        sums[j] += f.scores[i + j];
    for (int j = 0; j < LANES; j++)
        total += sums[j];
    for (i = 0; i < f.count; i++)
        out[f.ids[i]] = f.scores[i] / total;
    return 0;
}

/* Logits of the distribution that a token is drawn from. */
INLINE int64_t processed_row(const float *x, int64_t n, const pl_filter *filter, item *room, float *out)
{
    field f = field_in(room, n);
    const int64_t state = enter_kept(&f, x, n, NULL, filter, room);
    for (int64_t i = 0; i < f.count; i++)
        out[f.ids[i]] = (float)f.scores[i];
    return state;
}

INLINE void race_row(const double *q, int64_t n, uint64_t key, item *room, winners *w)
{
    field f = field_in(room, n);
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t stop = least_of(n, i + BLOCK);
        int64_t any = 0;
        for (int64_t j = i; j < stop; j++)
            any |= q[j] != 0.0;
        for (int64_t j = i; any && j < stop; j++) {
            f.scores[f.count] = q[j];
            f.ids[f.count] = j;
            f.count += q[j] != 0.0;
        }
    }
    for (int64_t i = 0; i < f.count; i++)
        f.scores[i] = logarithm(f.scores[i]) + gumbel(key, f.ids[i]);
    finish(&f, w);
}

#endif
