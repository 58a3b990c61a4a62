/* One row of logits and the noise of one position give one token. paceline/draw.py is the specification, and every
 * token drawn here is the one drawn there: whatever decides is computed by the same IEEE operations in the same
 * order. What is only a bound (which tokens could still win, where to look for candidates) may be rough.
 *
 * The loops are plain C that compilers turn into vectors, compiled once for each path below. */
#include "cpu.h"
#include "sample.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math") /* nobody reads the exception flags; a select need not be a branch */
#endif

#if defined(__clang__)
#define AVX512 "avx512f,avx512dq,avx512bw,avx512vl"
#else
#define AVX512 "avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512"
#endif

#define INLINE static inline __attribute__((always_inline))

enum { BLOCK = 64, WIDE = 256, BANDS = 16, HALVINGS = 16, MANY = 1024, FEW = 24 };

static const uint64_t GOLDEN = 0x9e3779b97f4a7c15u;
static const float GRID = 0x1p40f, LOG2E = 0x1.715476p+0f, ROUND = 0x1.8p23f;
static const double HIGHEST_NOISE = 37.0; /* -log(-log(1 - 2**-53)) is 36.74 */
static const double SLACK = 1.001;        /* far more than the float32 bounds below are off */

/* Integers in the order of the floats, -0.0 before 0.0; NaNs lie beyond the infinities on both sides. */
INLINE int32_t ordered(float x)
{
    int32_t i;
    memcpy(&i, &x, 4);
    return i ^ ((i >> 31) & 0x7fffffff);
}

INLINE float unordered(int32_t i)
{
    float x;
    i ^= (i >> 31) & 0x7fffffff;
    memcpy(&x, &i, 4);
    return x;
}

INLINE int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* The first place of the highest logit, or what is wrong with the row. */
INLINE int64_t find_top(const float *x, int64_t n, float *top)
{
    int32_t low = INT32_MAX;
    int64_t start = 0, id;
    *top = -INFINITY;
    for (int64_t i = 0; i < n; i += WIDE) {
        int32_t high = INT32_MIN;
        for (int64_t j = i, end = least_of(n, i + WIDE); j < end; j++) {
            int32_t value = ordered(x[j]);
            high = value > high ? value : high;
            low = value < low ? value : low;
        }
        if (high >= ordered(INFINITY))
            return PL_NOT_FINITE;
        if (unordered(high) > *top) {
            *top = unordered(high);
            start = i;
        }
    }
    if (low < ordered(-INFINITY))
        return PL_NOT_FINITE;
    if (*top == -INFINITY)
        return PL_NO_TOKEN;
    for (id = start; x[id] != *top; id++) {
    }
    return id;
}

/* exp((x - top) * scale) in float32; draw.py's masses */
INLINE float weigh(float x, float top, float scale)
{
    float exponent = (x - top) * scale * LOG2E;
    exponent = exponent < -60.0f ? -60.0f : exponent;
    float whole = (exponent + ROUND) - ROUND, fraction = exponent - whole, power;
    int32_t bits = ((int32_t)whole + 127) * (1 << 23);
    memcpy(&power, &bits, 4);
    float value = 0x1.430912p-13f;
    value = value * fraction + 0x1.5d87fep-10f;
    value = value * fraction + 0x1.3b2ab6p-7f;
    value = value * fraction + 0x1.c6b08ep-5f;
    value = value * fraction + 0x1.ebfbe0p-3f;
    value = value * fraction + 0x1.62e430p-1f;
    value = value * fraction + 0x1.000000p+0f;
    return value * power;
}

/* The nearest whole number, a tie to the even one, of 0 to 2**51. */
INLINE int64_t nearest(float x)
{
    double moved = (double)x + 0x1p52; /* whose last bits are the number */
    int64_t bits;
    memcpy(&bits, &moved, 8);
    return bits - 0x4330000000000000;
}

INLINE int64_t mass(float x, float top, float scale) { return nearest(weigh(x, top, scale) * GRID); }

INLINE int64_t block_mass(const float *x, int64_t n, float top, float scale, float low, float high)
{
    float weights[WIDE];
    int64_t total = 0;
    for (int64_t i = 0; i < n; i++) {
        float weight = weigh(x[i], top, scale) * GRID;
        weights[i] = (x[i] >= low) & (x[i] < high) ? weight : 0.0f;
    }
    for (int64_t i = 0; i < n; i++)
        total += nearest(weights[i]);
    return total;
}

/* The mass of the logits of at least low and below high. */
INLINE int64_t band_mass(const float *x, int64_t n, float top, float scale, float low, float high)
{
    int64_t total = 0, i = 0;
    for (; i + WIDE <= n; i += WIDE)
        total += block_mass(x + i, WIDE, top, scale, low, high);
    return total + block_mass(x + i, n - i, top, scale, low, high);
}

INLINE int64_t band_count(const float *x, int64_t n, float low, float high)
{
    int32_t count = 0;
    for (int64_t i = 0; i < n; i++)
        count += (x[i] >= low) & (x[i] < high);
    return count;
}

INLINE uint64_t mix(uint64_t h)
{
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
    return h ^ (h >> 31);
}

/* noise.py's log */
static double logarithm(double x)
{
    static const double term[] = {1.0, 1.0 / 3, 1.0 / 5, 1.0 / 7, 1.0 / 9, 1.0 / 11, 1.0 / 13, 1.0 / 15, 1.0 / 17,
                                  1.0 / 19, 1.0 / 21};
    int64_t bits, e;
    double m;
    memcpy(&bits, &x, 8);
    e = (bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffff) | ((int64_t)1023 << 52);
    memcpy(&m, &bits, 8);
    if (m > 0x1.6a09e667f3bcdp+0) {
        m *= 0.5;
        e++;
    }
    double s = (m - 1.0) / (m + 1.0), t = s * s, p = term[10], scale = (double)e;
    for (int i = 9; i >= 0; i--)
        p = p * t + term[i];
    return scale * 0x1.62e42fee00000p-1 + (scale * 0x1.a39ef35793c76p-33 + (s + s) * p);
}

static double uniform(uint64_t key, int64_t id)
{
    uint64_t bits = mix(key + GOLDEN * ((uint64_t)id + 1)) >> 11;
    return (double)(int64_t)(bits ? bits : 1) * 0x1p-53;
}

/* (x - top) / temperature + Gumbel noise */
static double score(float x, float top, double scale, uint64_t key, int64_t id)
{
    return ((double)x - (double)top) * scale - logarithm(-logarithm(uniform(key, id)));
}

/* Candidates: ranks ascend as logits descend and, among equal ones, as ids ascend. */
typedef pl_candidate item;

typedef struct {
    item *items; /* room for one more than the row has tokens */
    int64_t count;
} list;

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
                l->items[l->count++] = (item){rank_of(x[i + j], i + j), 1};
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

/* The rank of the last token that top_k and top_p keep, given the floor that min_p sets. */
INLINE uint64_t find_last(list *l, const float *x, int64_t n, float top, const pl_filter *f, float floor)
{
    const float scale = (float)f->scale;
    uint64_t last = 0;
    int64_t share;
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

/* The lowest logit that min_p keeps. */
static float floor_of(float top, double reach)
{
    double edge = (double)top + reach;
    if (!(edge > -FLT_MAX))
        return -FLT_MAX;
    float floor = (float)edge;
    return (double)floor < edge ? nextafterf(floor, INFINITY) : floor;
}

INLINE int64_t draw_row(const float *x, int64_t n, const pl_filter *f, uint64_t key, item *room)
{
    float top;
    int64_t best = find_top(x, n, &top);
    if (best < 0)
        return best;
    float floor = floor_of(top, f->reach);
    uint64_t last = rank_of(floor, UINT32_MAX);
    if ((f->top_k > 0 && f->top_k < n) || f->top_p < 1.0) {
        list l = {room, 0};
        last = find_last(&l, x, n, top, f, floor);
    }
    return find_winner(x, n, top, f->scale, last, key, best);
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
    list l = {room, 0};
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
#define CHOOSE(path, name) name##_portable
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
    (void)path;
    for (int64_t i = 0; i < rows; i++)
        out[i] = CHOOSE(path, top)(x + i * stride, n);
}

void pl_draw(int32_t path, const float *x, int64_t rows, int64_t stride, int64_t n, const pl_filter *filter,
             const uint64_t *keys, pl_candidate *room, int64_t *out)
{
    (void)path;
    for (int64_t i = 0; i < rows; i++)
        out[i] = CHOOSE(path, draw)(x + i * stride, n, filter, keys[i], room);
}

int64_t pl_logprobs(int32_t path, const float *x, int64_t n, int64_t token, int64_t k, pl_candidate *room,
                    pl_report *report, int64_t *ids)
{
    (void)path;
    return CHOOSE(path, report)(x, n, token, k, room, report, ids);
}

void pl_uniforms(uint64_t key, const int64_t *ids, int64_t n, double *out)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = uniform(key, ids[i]);
}
