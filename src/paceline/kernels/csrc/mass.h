/* One row of logits: its highest, and the masses of draw.py, exp((x - top) / temperature) in units of 2**-40. */
#ifndef PL_MASS_H
#define PL_MASS_H

#include "compile.h"
#include "sample.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum { WIDE = 256 };

static const float GRID = 0x1p40f, LOG2E = 0x1.715476p+0f, ROUND = 0x1.8p23f;

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

/* The highest of a few logits as an ordered integer; low becomes the lowest of all that it has seen. */
INLINE int32_t highest(const float *x, int64_t n, int32_t *low)
{
    int32_t high = INT32_MIN, least = *low;
    for (int64_t i = 0; i < n; i++) {
        int32_t value = ordered(x[i]);
        high = value > high ? value : high;
        least = value < least ? value : least;
    }
    *low = least;
    return high;
}

/* What is wrong with a row of which these are the highest and the lowest; 0 if nothing is. */
INLINE int64_t wrong(int32_t high, int32_t low)
{
    if (high >= ordered(INFINITY) || low < ordered(-INFINITY))
        return PL_NOT_FINITE;
    return high <= ordered(-INFINITY) ? PL_NO_TOKEN : 0;
}

/* The first place of the highest logit, or what is wrong with the row. */
INLINE int64_t find_top(const float *x, int64_t n, float *top)
{
    int32_t low = INT32_MAX, high = INT32_MIN;
    int64_t start = 0, id;
    for (int64_t i = 0; i < n; i += WIDE) {
        int32_t value = highest(x + i, least_of(n - i, WIDE), &low);
        start = value > high ? i : start;
        high = value > high ? value : high;
    }
    if ((id = wrong(high, low)))
        return id;
    *top = unordered(high);
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

#endif
