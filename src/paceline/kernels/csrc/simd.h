/* One vector of 16 floats, the same on every path: what is written with it computes each lane alike whether the
 * machine has one 512-bit register, two of 256 bits, or none. Sums and maxima over the lanes are fixed trees. */
#ifndef PL_SIMD_H
#define PL_SIMD_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PL_INLINE static inline __attribute__((always_inline))
#define PL_FETCH(p) __builtin_prefetch(p)
#define PL_NOINLINE static __attribute__((noinline))
#define PL_LANES 16

/* X(0) .. X(7): the sums of a tile are variables of their own, because gcc copies the elements of an array of
 * vectors about instead of keeping them in registers. Conditions in X are known when compiled. Each kind of tile is a function
 * that is not inlined, for the same reason. */
#define PL_EIGHT(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7)

/* Rows of a tile, as registers allow, and X(1, ...) to X(PL_ROWS, ...) for its kinds. */
#if defined(PL_AVX512)
#define PL_ROWS 8
#define PL_NUMBERS(X, ...) \
    X(1, __VA_ARGS__) X(2, __VA_ARGS__) X(3, __VA_ARGS__) X(4, __VA_ARGS__) \
    X(5, __VA_ARGS__) X(6, __VA_ARGS__) X(7, __VA_ARGS__) X(8, __VA_ARGS__)
#elif defined(PL_AVX2)
#define PL_ROWS 6
#define PL_NUMBERS(X, ...) \
    X(1, __VA_ARGS__) X(2, __VA_ARGS__) X(3, __VA_ARGS__) X(4, __VA_ARGS__) X(5, __VA_ARGS__) X(6, __VA_ARGS__)
#else
#define PL_ROWS 2
#define PL_NUMBERS(X, ...) X(1, __VA_ARGS__) X(2, __VA_ARGS__)
#endif

PL_INLINE float pl_from_bf16(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* Round to nearest, ties to even; a NaN stays one. */
PL_INLINE uint16_t pl_to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(PL_AVX512)
#include "simd_avx512.h"
#elif defined(PL_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

PL_INLINE vf v_zero(void) { return v_set1(0.0f); }

/* The first n lanes from memory, zeros in the rest. */
PL_INLINE vf v_loadn(const float *p, size_t n)
{
    float lanes[PL_LANES] = {0};
    if (n >= PL_LANES)
        return v_load(p);
    memcpy(lanes, p, n * sizeof(float));
    return v_load(lanes);
}

PL_INLINE void v_storen(float *p, vf x, size_t n)
{
    float lanes[PL_LANES];
    if (n >= PL_LANES) {
        v_store(p, x);
        return;
    }
    v_store(lanes, x);
    memcpy(p, lanes, n * sizeof(float));
}

PL_INLINE vf v_loadn_bf16(const uint16_t *p, size_t n)
{
    uint16_t lanes[PL_LANES] = {0};
    if (n >= PL_LANES)
        return v_load_bf16(p);
    memcpy(lanes, p, n * sizeof(uint16_t));
    return v_load_bf16(lanes);
}

/* e^x to about 1 ulp; exactly 0 below -87.3, so that a masked score of -inf weighs nothing. */
PL_INLINE vf v_exp(vf x)
{
    const vf low = v_set1(-87.3f);
    vf y = v_min(v_max(x, low), v_set1(88.3f));
    vf n = v_rint(v_mul(y, v_set1(1.44269504f)));
    vf r = v_fma(n, v_set1(-0.693359375f), y);
    vf p = v_set1(1.9875691500e-4f);
    r = v_fma(n, v_set1(2.12194440e-4f), r);
    p = v_fma(p, r, v_set1(1.3981999507e-3f));
    p = v_fma(p, r, v_set1(8.3334519073e-3f));
    p = v_fma(p, r, v_set1(4.1665795894e-2f));
    p = v_fma(p, r, v_set1(1.6666665459e-1f));
    p = v_fma(p, r, v_set1(5.0000001201e-1f));
    p = v_fma(v_mul(r, r), p, v_add(r, v_set1(1.0f)));
    return v_zero_below(v_scale2(p, n), x, low);
}

PL_INLINE vf v_sigmoid(vf x)
{
    const vf one = v_set1(1.0f);
    return v_div(one, v_add(one, v_exp(v_sub(v_zero(), x))));
}

/* tanh(x) = sign(x) (1 - t) / (1 + t) with t = e^(-2|x|); near 0, where 1 - t cancels, a series. */
PL_INLINE vf v_tanh(vf x)
{
    const vf one = v_set1(1.0f);
    vf a = v_abs(x), s = v_mul(x, x);
    vf t = v_exp(v_mul(a, v_set1(-2.0f)));
    vf big = v_div(v_sub(one, t), v_add(one, t));
    vf p = v_set1(2.1869488e-2f);
    p = v_fma(p, s, v_set1(-5.3968254e-2f));
    p = v_fma(p, s, v_set1(1.3333333e-1f));
    p = v_fma(p, s, v_set1(-3.3333333e-1f));
    p = v_fma(v_mul(p, s), a, a);
    return v_sign(v_choose_below(a, v_set1(0.3f), p, big), x);
}

/* Error function: a series below 0.5, else Abramowitz and Stegun 7.1.26 (error at most 1.5e-7). */
PL_INLINE vf v_erf(vf x)
{
    const vf one = v_set1(1.0f);
    vf a = v_abs(x), s = v_mul(x, x);
    vf t = v_div(one, v_fma(a, v_set1(0.3275911f), one));
    vf p = v_set1(1.061405429f), q = v_set1(-7.5757576e-4f);
    p = v_fma(p, t, v_set1(-1.453152027f));
    p = v_fma(p, t, v_set1(1.421413741f));
    p = v_fma(p, t, v_set1(-0.284496736f));
    p = v_fma(p, t, v_set1(0.254829592f));
    p = v_sub(one, v_mul(v_mul(p, t), v_exp(v_sub(v_zero(), s))));
    q = v_fma(q, s, v_set1(4.6296296e-3f));
    q = v_fma(q, s, v_set1(-2.3809524e-2f));
    q = v_fma(q, s, v_set1(0.1f));
    q = v_fma(q, s, v_set1(-3.3333333e-1f));
    q = v_mul(v_fma(v_mul(q, s), a, a), v_set1(1.1283791671f));
    return v_sign(v_choose_below(a, v_set1(0.5f), q, p), x);
}

#endif
