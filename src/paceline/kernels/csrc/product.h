/* Products of rows with a packed matrix. An output is one chain of additions over k (or a sum of whole numbers),
 * whatever the number of rows beside it; rows in a tile share the reading of weights, never the arithmetic. */
#ifndef PL_PRODUCT_H
#define PL_PRODUCT_H

#include "rows.h"

#define PL_GROUP 3 /* tiles of 16 outputs that are worked on together */

enum { PL_STORE, PL_ADD, PL_LOGITS };

/* Where outputs go: stored; added to what is there, times `multiplier`; or stored times `multiplier` and capped,
 * no further than column n. */
typedef struct {
    float *out;
    size_t stride, n;
    int mode;
    float multiplier, cap;
} pl_sink;

PL_INLINE void pl_emit(const pl_sink *sink, size_t row, size_t tile, vf v)
{
    float *out = sink->out + row * sink->stride + tile * PL_LANES;
    if (sink->mode == PL_STORE) {
        v_store(out, v);
    } else if (sink->mode == PL_ADD) {
        v_store(out, v_add(v_load(out), v_mul(v, v_set1(sink->multiplier))));
    } else {
        v = v_mul(v, v_set1(sink->multiplier));
        if (sink->cap > 0.0f)
            v = pl_cap(v, sink->cap);
        v_storen(out, v, sink->n - tile * PL_LANES);
    }
}

#if defined(PL_AVX512)

#define PL_ROWS 8

PL_INLINE void pl_int8_tile(const int rows, const int tiles, const pl_input *in, size_t stride, const uint8_t *w,
                            size_t k, int32_t *sums)
{
    __m512i acc[2][8][PL_GROUP];
    const int halves = rows <= 2 ? 2 : 1; /* few rows: two chains an output, to hide the latency */
    for (int h = 0; h < halves; h++)
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < tiles; t++)
                acc[h][r][t] = _mm512_setzero_si512();
    for (size_t i = 0; i < k; i += 4 * (size_t)halves) {
        for (int h = 0; h < halves; h++) {
            __m512i weights[PL_GROUP];
            for (int t = 0; t < tiles; t++) {
                const uint8_t *at = w + (size_t)t * PL_LANES * k + (i + 4 * (size_t)h) * PL_LANES;
                weights[t] = _mm512_loadu_si512(at);
                _mm_prefetch((const char *)at + 2048, _MM_HINT_T0);
            }
            for (int r = 0; r < rows; r++) {
                int32_t four;
                memcpy(&four, in + (size_t)r * stride + i + 4 * (size_t)h, 4);
                __m512i x = _mm512_set1_epi32(four);
                for (int t = 0; t < tiles; t++)
                    acc[h][r][t] = _mm512_dpbusd_epi32(acc[h][r][t], weights[t], x);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < tiles; t++) {
            __m512i sum = acc[0][r][t];
            if (halves == 2)
                sum = _mm512_add_epi32(sum, acc[1][r][t]);
            _mm512_storeu_si512(sums + (r * tiles + t) * PL_LANES, sum);
        }
}

PL_INLINE vf v_from_sums(const int32_t *sums, int32_t offset)
{
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_loadu_si512(sums), _mm512_set1_epi32(offset)));
}

#elif defined(PL_AVX2)

#define PL_ROWS 2

PL_INLINE void pl_int8_tile(const int rows, const int tiles, const pl_input *in, size_t stride, const uint8_t *w,
                            size_t k, int32_t *sums)
{
    for (int t = 0; t < tiles; t++) {
        __m256i acc[PL_ROWS][4];
        const uint8_t *at = w + (size_t)t * PL_LANES * k;
        for (int r = 0; r < rows; r++)
            for (int q = 0; q < 4; q++)
                acc[r][q] = _mm256_setzero_si256();
        for (size_t i = 0; i < k; i += 4)
            for (int q = 0; q < 4; q++) { /* 4 outputs x 4 inputs, widened to 16 bits: nothing saturates */
                __m256i weights = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(at + i * PL_LANES + 16 * q)));
                for (int r = 0; r < rows; r++) {
                    int64_t four;
                    memcpy(&four, in + (size_t)r * stride + i, 8);
                    __m256i x = _mm256_set1_epi64x(four);
                    acc[r][q] = _mm256_add_epi32(acc[r][q], _mm256_madd_epi16(weights, x));
                }
            }
        for (int r = 0; r < rows; r++)
            for (int q = 0; q < 4; q += 2) { /* two sums an output, side by side */
                __m256i pair = _mm256_hadd_epi32(acc[r][q], acc[r][q + 1]);
                pair = _mm256_permute4x64_epi64(pair, 0xd8);
                _mm256_storeu_si256((__m256i *)(sums + (r * tiles + t) * PL_LANES + 4 * q), pair);
            }
    }
}

PL_INLINE vf v_from_sums(const int32_t *sums, int32_t offset)
{
    __m256i o = _mm256_set1_epi32(offset);
    return v_pair(_mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_loadu_si256((const __m256i *)sums), o)),
                  _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_loadu_si256((const __m256i *)(sums + 8)), o)));
}

#else

#define PL_ROWS 2

PL_INLINE void pl_int8_tile(const int rows, const int tiles, const pl_input *in, size_t stride, const uint8_t *w,
                            size_t k, int32_t *sums)
{
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < tiles; t++) {
            const uint8_t *at = w + (size_t)t * PL_LANES * k;
            const pl_input *x = in + (size_t)r * stride;
            int32_t acc[PL_LANES] = {0};
            for (size_t i = 0; i < k; i += 4, at += 4 * PL_LANES)
                for (int o = 0; o < PL_LANES; o++)
                    acc[o] += at[4 * o] * x[i] + at[4 * o + 1] * x[i + 1] + at[4 * o + 2] * x[i + 2] +
                              at[4 * o + 3] * x[i + 3];
            memcpy(sums + (r * tiles + t) * PL_LANES, acc, sizeof acc);
        }
}

PL_INLINE vf v_from_sums(const int32_t *sums, int32_t offset)
{
    vf r;
    PL_EACH r[i] = (float)(sums[i] + offset);
    return r;
}

#endif

PL_INLINE void pl_float_tile(const int rows, const int tiles, const int bf16, const float *in, size_t stride,
                             const void *w, size_t k, vf *sums)
{
    vf acc[8][PL_GROUP];
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < tiles; t++)
            acc[r][t] = v_zero();
    for (size_t i = 0; i < k; i++) {
        vf weights[PL_GROUP];
        for (int t = 0; t < tiles; t++) {
            size_t at = ((size_t)t * k + i) * PL_LANES;
            weights[t] = bf16 ? v_load_bf16((const uint16_t *)w + at) : v_load((const float *)w + at);
        }
        for (int r = 0; r < rows; r++) {
            vf x = v_set1(in[(size_t)r * stride + i]);
            for (int t = 0; t < tiles; t++)
                acc[r][t] = v_fma(weights[t], x, acc[r][t]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < tiles; t++)
            sums[r * tiles + t] = acc[r][t];
}

/* Rows row .. row + rows - 1 times tiles tile .. tile + tiles - 1, all counts known when compiled. */
PL_INLINE void pl_product_tile(const int rows, const int tiles, const int format, const pl_linear *w,
                               const pl_inputs *in, size_t row, size_t tile, const pl_sink *sink)
{
    size_t k = pl_padded((size_t)w->k, format);
    vf out[8 * PL_GROUP];
    if (format == PL_INT8) {
        int32_t sums[8 * PL_GROUP * PL_LANES];
        const uint8_t *data = (const uint8_t *)w->data + tile * PL_LANES * k;
        pl_int8_tile(rows, tiles, (const pl_input *)in->data + row * in->stride, in->stride, data, k, sums);
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < tiles; t++) {
                vf v = v_from_sums(sums + (r * tiles + t) * PL_LANES, in->offset[row + (size_t)r]);
                v = v_mul(v, v_load(w->scale + (tile + (size_t)t) * PL_LANES));
                out[r * tiles + t] = v_mul(v, v_set1(in->scale[row + (size_t)r]));
            }
    } else {
        size_t at = tile * PL_LANES * (size_t)w->k * (format == PL_BF16 ? 2 : 4);
        pl_float_tile(rows, tiles, format == PL_BF16, (const float *)in->data + row * in->stride, in->stride,
                      (const char *)w->data + at, (size_t)w->k, out);
    }
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < tiles; t++) {
            vf v = out[r * tiles + t];
            if (w->bias != NULL)
                v = v_add(v, v_load(w->bias + (tile + (size_t)t) * PL_LANES));
            pl_emit(sink, row + (size_t)r, tile + (size_t)t, v);
        }
}

PL_INLINE void pl_product_rows(const int tiles, const int format, const pl_linear *w, const pl_inputs *in,
                               size_t rows, size_t tile, const pl_sink *sink)
{
    size_t row = 0;
    for (; row + PL_ROWS <= rows; row += PL_ROWS)
        pl_product_tile(PL_ROWS, tiles, format, w, in, row, tile, sink);
    switch (rows - row) {
#if PL_ROWS == 8
    case 7: pl_product_tile(7, tiles, format, w, in, row, tile, sink); break;
    case 6: pl_product_tile(6, tiles, format, w, in, row, tile, sink); break;
    case 5: pl_product_tile(5, tiles, format, w, in, row, tile, sink); break;
    case 4: pl_product_tile(4, tiles, format, w, in, row, tile, sink); break;
    case 3: pl_product_tile(3, tiles, format, w, in, row, tile, sink); break;
    case 2: pl_product_tile(2, tiles, format, w, in, row, tile, sink); break;
#endif
    case 1: pl_product_tile(1, tiles, format, w, in, row, tile, sink); break;
    default: break;
    }
}

PL_INLINE void pl_product_format(const int format, const pl_linear *w, const pl_inputs *in, size_t rows,
                                 size_t from, size_t to, const pl_sink *sink)
{
    for (; from + PL_GROUP <= to; from += PL_GROUP)
        pl_product_rows(PL_GROUP, format, w, in, rows, from, sink);
    for (; from < to; from++)
        pl_product_rows(1, format, w, in, rows, from, sink);
}

/* Tiles from .. to - 1 of all rows. */
static void pl_product_tiles(const pl_linear *w, const pl_inputs *in, size_t rows, size_t from, size_t to,
                             const pl_sink *sink)
{
    if (w->format == PL_INT8)
        pl_product_format(PL_INT8, w, in, rows, from, to, sink);
    else if (w->format == PL_BF16)
        pl_product_format(PL_BF16, w, in, rows, from, to, sink);
    else
        pl_product_format(PL_FP32, w, in, rows, from, to, sink);
}

/* Inside a region; ends with a barrier. */
static void pl_product(pl_pool *pool, const pl_linear *w, const pl_inputs *in, size_t rows, const pl_sink *sink)
{
    size_t tiles = pl_round_up((size_t)w->n, PL_LANES) / PL_LANES;
    size_t share = tiles / ((size_t)pl_pool_threads(pool) * 8 * PL_GROUP) * PL_GROUP;
    if (share == 0)
        share = PL_GROUP;
    for (;;) {
        size_t from = (size_t)pl_pool_claim(pool) * share;
        if (from >= tiles)
            break;
        pl_product_tiles(w, in, rows, from, from + share < tiles ? from + share : tiles, sink);
    }
    pl_pool_barrier(pool);
}

#endif
