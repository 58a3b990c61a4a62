/* Which tokens of a row the filters keep: candidates, and top-k and top-p on the largest of them alone. */
#ifndef PL_SELECT_H
#define PL_SELECT_H

#include "mass.h"

enum { BLOCK = 64, BANDS = 16, HALVINGS = 16, MANY = 1024, FEW = 24 };

/* Candidates: ranks ascend as logits descend and, among equal ones, as ids ascend. */
typedef pl_candidate item;

typedef struct {
    item *items; /* room for one more than the row has tokens */
    const int64_t *ids; /* the tokens of the row's columns; NULL where column i is token i */
    int64_t count;
} list;

INLINE int64_t id_at(const int64_t *ids, int64_t column) { return ids ? ids[column] : column; }

INLINE uint64_t rank_of(float x, int64_t id)
{
    uint32_t up = (uint32_t)ordered(x + 0.0f) ^ 0x80000000u; /* -0.0 becomes 0.0 */
    return (uint64_t)~up << 32 | (uint32_t)id;
}

static int64_t id_of(uint64_t rank) { return (int64_t)(uint32_t)rank; }

static float logit_of(uint64_t rank) { return unordered((int32_t)(~(uint32_t)(rank >> 32) ^ 0x80000000u)); }

/* Add the tokens whose logits are at least low and below high. */
INLINE void collect(list *l, const float *x, int64_t n, float low, float high)
{
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t count = least_of(n - i, BLOCK);
        int32_t any = 0;
        for (int64_t j = 0; j < count; j++)
            any |= (x[i + j] >= low) & (x[i + j] < high);
        for (int64_t j = 0; any && j < count; j++)
            if (x[i + j] >= low && x[i + j] < high)
                l->items[l->count++] = (item){rank_of(x[i + j], id_at(l->ids, i + j)), 1};
    }
}

static void insertion_sort(item *a, int64_t low, int64_t high)
{
    for (int64_t i = low + 1; i < high; i++) {
        item moved = a[i];
        int64_t j = i;
        for (; j > low && a[j - 1].rank > moved.rank; j--)
            a[j] = a[j - 1];
        a[j] = moved;
    }
}

static int by_rank(const void *a, const void *b)
{
    uint64_t first = ((const item *)a)->rank, second = ((const item *)b)->rank;
    return (first > second) - (first < second);
}

static uint64_t median(uint64_t a, uint64_t b, uint64_t c)
{
    if (a > b) {
        uint64_t t = a;
        a = b;
        b = t;
    }
    return c < a ? a : c > b ? b : c;
}

/* The place at which the mass, summed in the order of ranks, reaches the share, all before it in front of it (in any
 * order); n where it never does. A quickselect that goes by mass. */
static int64_t select_share(item *a, int64_t n, int64_t share)
{
    int64_t low = 0, high = n;
    while (high - low > FEW) {
        uint64_t pivot = median(a[low].rank, a[low + (high - low) / 2].rank, a[high - 1].rank);
        int64_t middle = low, sum = 0;
        for (int64_t i = low; i < high; i++) { /* without branches, which would be guessed wrong half the time */
            item t = a[i];
            int64_t in_front = t.rank <= pivot;
            a[i] = a[middle];
            a[middle] = t;
            middle += in_front;
            sum += t.mass & -in_front;
        }
        if (sum >= share) {
            high = middle;
        } else {
            share -= sum;
            low = middle;
        }
    }
    insertion_sort(a, low, high);
    for (; low < high; low++)
        if ((share -= a[low].mass) <= 0)
            return low;
    return n;
}

INLINE int64_t weigh_items(item *a, int64_t n, float top, float scale)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += a[i].mass = mass(logit_of(a[i].rank), top, scale);
    return sum;
}

/* The lower edge of a band of candidates; the last one reaches down to the floor. */
static float band(int index, float top, double scale, float floor)
{
    double edge = (double)top - 2.0 * (index + 1) / scale;
    return index + 1 < BANDS && edge > (double)floor ? (float)edge : floor;
}

static int64_t share_of(double top_p, int64_t total)
{
    int64_t share = least_of((int64_t)ceil(top_p * (double)total), total);
    return share > 1 ? share : 1;
}

/* Add the first count tokens, in any order, or all that there are down to the floor. */
INLINE void collect_first(list *l, const float *x, int64_t n, float top, double scale, float floor, int64_t count)
{
    float low, high = INFINITY;
    for (int i = 0; i < BANDS && high > floor && l->count < count; i++, high = low) {
        low = band(i, top, scale, floor);
        collect(l, x, n, low, high);
    }
    if (l->count > count)
        l->count = select_share(l->items, l->count, count) + 1;
}

/* Add a band of tokens in which the mass, summed from the highest logit down, reaches the share, and take what lies
 * above it off the share. While the tokens of a band are many it is halved: one more look at the row costs less than
 * to sort them. */
INLINE void collect_crossing(list *l, const float *x, int64_t n, float top, double scale, float floor, int64_t *share)
{
    float low = nextafterf(top, INFINITY), high;
    int64_t sum = 0, found;
    int i = 0;
    do {
        *share -= sum;
        high = low;
        low = band(i++, top, scale, floor);
        found = band_count(x, n, low, high);
        l->count = 0;
        if (found <= MANY) {
            collect(l, x, n, low, high);
            sum = weigh_items(l->items, l->count, top, (float)scale);
        } else {
            sum = band_mass(x, n, top, (float)scale, low, high);
        }
    } while (sum < *share && low > floor);
    if (found <= MANY)
        return;
    for (i = 0; i < HALVINGS && found > MANY; i++) {
        float middle = low + (high - low) * 0.5f;
        if (!(middle > low && middle < high))
            break;
        sum = band_mass(x, n, top, (float)scale, middle, high);
        if (sum >= *share) {
            low = middle;
        } else {
            *share -= sum;
            high = middle;
        }
        found = band_count(x, n, low, high);
    }
    collect(l, x, n, low, high);
    weigh_items(l->items, l->count, top, (float)scale);
}

/* The lowest logit that min_p keeps. */
static float floor_of(float top, double reach)
{
    double edge = (double)top + reach;
    if (!(edge > -FLT_MAX))
        return -FLT_MAX;
    float floor = (float)edge;
    return (double)floor < edge ? nextafterf(floor, INFINITY) : floor;
}

/* The rank of the last token that the filters keep. */
INLINE uint64_t find_last(list *l, const float *x, int64_t n, float top, const pl_filter *f)
{
    const float scale = (float)f->scale, floor = floor_of(top, f->reach);
    uint64_t last = 0;
    int64_t share;
    if ((f->top_k <= 0 || f->top_k >= n) && f->top_p >= 1.0)
        return rank_of(floor, UINT32_MAX);
    if (f->top_k > 0 && f->top_k < n) {
        collect_first(l, x, n, top, f->scale, floor, f->top_k);
        share = share_of(f->top_p, weigh_items(l->items, l->count, top, scale));
    } else {
        share = share_of(f->top_p, band_mass(x, n, top, scale, floor, INFINITY));
        collect_crossing(l, x, n, top, f->scale, floor, &share);
    }
    if (f->top_p < 1.0)
        return l->items[select_share(l->items, l->count, share)].rank;
    for (int64_t i = 0; i < l->count; i++)
        last = l->items[i].rank > last ? l->items[i].rank : last;
    return last;
}

#endif
