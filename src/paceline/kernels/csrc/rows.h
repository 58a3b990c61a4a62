/* What is done to one row at a time: norm, rotation, quantization, activation, rotary positions. */
#ifndef PL_ROWS_H
#define PL_ROWS_H

#include "paceline.h"
#include "simd.h"

/* int8 products read 8-bit inputs, or 16-bit ones where the path widens. */
#if defined(PL_AVX2)
typedef int16_t pl_input;
#define v_store_input v_store_s16
#else
typedef int8_t pl_input;
#define v_store_input v_store_s8
#endif

/* The inputs of a product: row i at data + i * stride elements (pl_input under int8, else float). */
typedef struct {
    void *data;
    float *scale;
    int32_t *offset; /* -128 x the sum of the row, as the weights have 128 added */
    size_t stride;
} pl_inputs;

PL_INLINE size_t pl_round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

PL_INLINE size_t pl_padded(size_t k, int format) { return pl_round_up(k, format == PL_INT8 ? 64 : PL_LANES); }

PL_INLINE void pl_clear(float *p, size_t from, size_t to) { memset(p + from, 0, (to - from) * sizeof(float)); }

/* Blocks of 64 values by the orthonormal Hadamard matrix; returns the largest absolute value of each lane. */
static vf pl_rotate(const float *in, float *out, size_t n)
{
    const vf scale = v_set1(0.125f);
    vf top = v_zero();
    for (size_t i = 0; i < n; i += 64) {
        vf a = v_load(in + i), b = v_load(in + i + 16), c = v_load(in + i + 32), d = v_load(in + i + 48);
        vf e = v_add(a, b), f = v_sub(a, b), g = v_add(c, d), h = v_sub(c, d);
        vf y[4] = {v_add(e, g), v_add(f, h), v_sub(e, g), v_sub(f, h)};
        for (int j = 0; j < 4; j++) {
            vf z = v_butterfly1(v_butterfly2(v_butterfly4(v_butterfly8(y[j]))));
            z = v_mul(z, scale);
            v_store(out + i + 16 * j, z);
            top = v_max(top, v_abs(z));
        }
    }
    return top;
}

/* One row becomes the input of a product; `row` holds n values and is padded with zeros. Under int8 it is rotated
 * in place and has one scale, its largest absolute value / 127, and is rounded to nearest, ties to even. */
static void pl_quantize(float *row, size_t n, int format, pl_inputs to, size_t slot)
{
    size_t padded = pl_padded(n, format);
    pl_clear(row, n, padded);
    if (format != PL_INT8) {
        memcpy((float *)to.data + slot * to.stride, row, padded * sizeof(float));
        return;
    }
    float top = v_hmax(pl_rotate(row, row, padded));
    vf inverse = v_set1(top > 0.0f ? 127.0f / top : 0.0f), sum = v_zero();
    pl_input *out = (pl_input *)to.data + slot * to.stride;
    for (size_t i = 0; i < padded; i += PL_LANES) {
        vf x = v_rint(v_mul(v_load(row + i), inverse));
        sum = v_add(sum, x); /* whole numbers below 2^24: exact */
        v_store_input(out + i, x);
    }
    to.scale[slot] = top / 127.0f;
    to.offset[slot] = -128 * (int32_t)v_hsum(sum);
}

static float pl_mean_square(const float *x, size_t n)
{
    vf sum[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
    for (size_t i = 0; i < n; i += 4 * PL_LANES)
        for (size_t j = 0; j < 4 && i + j * PL_LANES < n; j++) {
            vf v = v_loadn(x + i + j * PL_LANES, n - i - j * PL_LANES);
            sum[j] = v_fma(v, v, sum[j]);
        }
    return v_hsum(v_add(v_add(sum[0], sum[1]), v_add(sum[2], sum[3]))) / (float)n;
}

/* out = x / sqrt(mean(x^2) + eps) * weight */
static void pl_norm(const float *x, const float *weight, size_t n, float eps, float *out)
{
    vf inverse = v_set1(1.0f / sqrtf(pl_mean_square(x, n) + eps));
    for (size_t i = 0; i < n; i += PL_LANES) {
        vf y = v_mul(v_mul(v_loadn(x + i, n - i), inverse), v_loadn(weight + i, n - i));
        v_storen(out + i, y, n - i);
    }
}

PL_INLINE vf pl_activation(int kind, vf x)
{
    const vf half = v_set1(0.5f), one = v_set1(1.0f);
    if (kind == PL_SILU)
        return v_mul(x, v_sigmoid(x));
    if (kind == PL_GELU)
        return v_mul(v_mul(half, x), v_add(one, v_erf(v_mul(x, v_set1(0.70710678f)))));
    vf inner = v_fma(v_mul(v_mul(x, x), x), v_set1(0.044715f), x);
    return v_mul(v_mul(half, x), v_add(one, v_tanh(v_mul(inner, v_set1(0.79788456f)))));
}

static void pl_activate(int kind, const float *gate, const float *up, float *out, size_t n)
{
    for (size_t i = 0; i < n; i += PL_LANES) {
        vf y = v_mul(pl_activation(kind, v_loadn(gate + i, n - i)), v_loadn(up + i, n - i));
        v_storen(out + i, y, n - i);
    }
}

PL_INLINE vf pl_cap(vf x, float cap) { return v_mul(v_tanh(v_div(x, v_set1(cap))), v_set1(cap)); }

/* Values i and i + dims / 2 turn by the angle of position and i; the rest stays. */
static void pl_rope(float *head, const float *cos, const float *sin, size_t dims)
{
    size_t half = dims / 2;
    for (size_t i = 0; i < half; i += PL_LANES) {
        size_t left = half - i;
        vf a = v_loadn(head + i, left), b = v_loadn(head + half + i, left);
        vf c = v_loadn(cos + i, left), s = v_loadn(sin + i, left);
        v_storen(head + i, v_sub(v_mul(a, c), v_mul(b, s)), left);
        v_storen(head + half + i, v_add(v_mul(b, c), v_mul(a, s)), left);
    }
}

#endif
