/* Products of rows with a packed matrix. An output is one chain of additions over k (or a sum of whole numbers),
 * whatever the number of rows beside it; rows in a tile share the reading of weights, never the arithmetic. */
#ifndef PL_PRODUCT_H
#define PL_PRODUCT_H

#include "rows.h"

#define PL_GROUP 3 /* tiles of 16 outputs that are worked on together */
#define PL_NEAR (96 << 10) /* bytes of a tile: two groups of these fit the second cache */
/* Whether registers hold the sums of so many rows and all tiles of a group. */
#if defined(PL_AVX2)
#define PL_TOGETHER(rows) ((rows) <= 2)
#else
#define PL_TOGETHER(rows) 1
#endif

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

PL_INLINE __m512i pl_four_inputs(const pl_input *in)
{
    int32_t four;
    memcpy(&four, in, 4);
    return _mm512_set1_epi32(four);
}

/* `tiles` is 1 or 3. With one or two rows an output has two chains, to hide the latency. */
PL_INLINE void pl_int8_tile(const int rows, const int tiles, const pl_input *in, size_t stride, const uint8_t *w,
                            size_t k, const char *const *fetch, int32_t *sums)
{
    const __m512i zero = _mm512_setzero_si512();
    const size_t apart = tiles == 3 ? k * PL_LANES : 0;
#define PL_ZERO(r) __m512i a##r = zero, b##r = zero, c##r = zero;
    PL_EIGHT(PL_ZERO)
#undef PL_ZERO
#define PL_ADD_ROW(sum, row) \
    if ((row) < rows) { \
        __m512i x = pl_four_inputs(in + (row) * stride + i); \
        a##sum = _mm512_dpbusd_epi32(a##sum, w0, x); \
        if (tiles == 3) { \
            b##sum = _mm512_dpbusd_epi32(b##sum, w1, x); \
            c##sum = _mm512_dpbusd_epi32(c##sum, w2, x); \
        } \
    }
#define PL_SAME(r) PL_ADD_ROW(r, r)
#define PL_WEIGHTS \
    const uint8_t *at = w + i * PL_LANES; \
    __m512i w0 = _mm512_loadu_si512(at), w1 = _mm512_loadu_si512(at + apart); \
    __m512i w2 = _mm512_loadu_si512(at + 2 * apart); \
    PL_FETCH(fetch[0] + i * PL_LANES); \
    PL_FETCH(fetch[1] + i * PL_LANES); \
    PL_FETCH(fetch[2] + i * PL_LANES);
    for (size_t i = 0; i < k; i += 4) {
        {
            PL_WEIGHTS
            PL_EIGHT(PL_SAME)
        }
        if (rows <= 2) {
            i += 4;
            PL_WEIGHTS
            PL_ADD_ROW(4, 0)
            PL_ADD_ROW(5, 1)
        }
    }
    if (rows <= 2) {
        a0 = _mm512_add_epi32(a0, a4), b0 = _mm512_add_epi32(b0, b4), c0 = _mm512_add_epi32(c0, c4);
        a1 = _mm512_add_epi32(a1, a5), b1 = _mm512_add_epi32(b1, b5), c1 = _mm512_add_epi32(c1, c5);
    }
#define PL_KEEP(r) \
    if (r < rows) { \
        _mm512_storeu_si512(sums + r * tiles * PL_LANES, a##r); \
        if (tiles == 3) { \
            _mm512_storeu_si512(sums + (r * tiles + 1) * PL_LANES, b##r); \
            _mm512_storeu_si512(sums + (r * tiles + 2) * PL_LANES, c##r); \
        } \
    }
    PL_EIGHT(PL_KEEP)
#undef PL_KEEP
#undef PL_WEIGHTS
#undef PL_SAME
#undef PL_ADD_ROW
}

PL_INLINE vf v_from_sums(const int32_t *sums, int32_t offset)
{
    return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_loadu_si512(sums), _mm512_set1_epi32(offset)));
}

#elif defined(PL_AVX2)

/* 4 outputs x 4 inputs, widened to 16 bits: nothing saturates. */
PL_INLINE __m256i pl_widen(const uint8_t *w) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)w)); }

PL_INLINE __m256i pl_four_inputs(const pl_input *in)
{
    int64_t four;
    memcpy(&four, in, 8);
    return _mm256_set1_epi64x(four);
}

/* Two sums an output, side by side, of 4 and 4 outputs. */
PL_INLINE void pl_store_sums(int32_t *sums, __m256i a, __m256i b)
{
    _mm256_storeu_si256((__m256i *)sums, _mm256_permute4x64_epi64(_mm256_hadd_epi32(a, b), 0xd8));
}

/* `fours` (2 or 4) x 4 outputs of one tile. */
PL_INLINE void pl_int8_fours(const int rows, const int fours, const pl_input *in, size_t stride, const uint8_t *w,
                             size_t k, const char *fetch, int32_t *sums, size_t apart)
{
    const __m256i zero = _mm256_setzero_si256();
#define PL_ZERO(r) __m256i a##r = zero, b##r = zero, c##r = zero, d##r = zero;
    PL_EIGHT(PL_ZERO)
#undef PL_ZERO
    for (size_t i = 0; i < k; i += 4, w += 4 * PL_LANES) {
        __m256i w0 = pl_widen(w), w1 = pl_widen(w + 16), w2 = w0, w3 = w1;
        if (fours == 4)
            w2 = pl_widen(w + 32), w3 = pl_widen(w + 48);
        if (fetch != NULL)
            PL_FETCH(fetch + i * PL_LANES);
#define PL_ADD_ROW(r) \
    if (r < rows) { \
        __m256i x = pl_four_inputs(in + r * stride + i); \
        a##r = _mm256_add_epi32(a##r, _mm256_madd_epi16(w0, x)); \
        b##r = _mm256_add_epi32(b##r, _mm256_madd_epi16(w1, x)); \
        if (fours == 4) { \
            c##r = _mm256_add_epi32(c##r, _mm256_madd_epi16(w2, x)); \
            d##r = _mm256_add_epi32(d##r, _mm256_madd_epi16(w3, x)); \
        } \
    }
        PL_EIGHT(PL_ADD_ROW)
#undef PL_ADD_ROW
    }
#define PL_KEEP(r) \
    if (r < rows) { \
        pl_store_sums(sums + r * apart, a##r, b##r); \
        if (fours == 4) \
            pl_store_sums(sums + r * apart + 8, c##r, d##r); \
    }
    PL_EIGHT(PL_KEEP)
#undef PL_KEEP
}

PL_INLINE void pl_int8_tile(const int rows, const int tiles, const pl_input *in, size_t stride, const uint8_t *w,
                            size_t k, const char *const *fetch, int32_t *sums)
{
    const size_t apart = (size_t)tiles * PL_LANES;
    for (int t = 0; t < tiles; t++, w += PL_LANES * k, sums += PL_LANES) {
        if (PL_TOGETHER(rows)) {
            pl_int8_fours(rows, 4, in, stride, w, k, fetch[t], sums, apart);
        } else { /* registers hold half a tile */
            pl_int8_fours(rows, 2, in, stride, w, k, fetch[t], sums, apart);
            pl_int8_fours(rows, 2, in, stride, w + 32, k, NULL, sums + 8, apart);
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

PL_INLINE void pl_int8_tile(const int rows, const int tiles, const pl_input *in, size_t stride, const uint8_t *w,
                            size_t k, const char *const *fetch, int32_t *sums)
{
    (void)fetch;
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

PL_INLINE vf pl_load_weights(const void *w, size_t at, const int bf16)
{
    return bf16 ? v_load_bf16((const uint16_t *)w + at) : v_load((const float *)w + at);
}

/* Row r's sums go to sums[r * every ...]. */
PL_INLINE void pl_float_tiles(const int rows, const int tiles, const int bf16, const float *in, size_t stride,
                              const void *w, size_t k, const char *const *fetch, vf *sums, const int every)
{
    const vf zero = v_zero();
    const size_t apart = tiles == 3 ? k * PL_LANES : 0, line = PL_LANES * (bf16 ? 2 : 4);
#define PL_ZERO(r) vf a##r = zero, b##r = zero, c##r = zero;
    PL_EIGHT(PL_ZERO)
#undef PL_ZERO
    for (size_t i = 0; i < k; i++) {
        vf w0 = pl_load_weights(w, i * PL_LANES, bf16), w1 = w0, w2 = w0;
        if (!bf16 || i % 2 == 0) {
            PL_FETCH(fetch[0] + i * line);
            if (tiles == every) {
                PL_FETCH(fetch[1] + i * line);
                PL_FETCH(fetch[2] + i * line);
            }
        }
        if (tiles == 3) {
            w1 = pl_load_weights(w, i * PL_LANES + apart, bf16);
            w2 = pl_load_weights(w, i * PL_LANES + 2 * apart, bf16);
        }
#define PL_ADD_ROW(r) \
    if (r < rows) { \
        vf x = v_set1(in[r * stride + i]); \
        a##r = v_fma(w0, x, a##r); \
        if (tiles == 3) { \
            b##r = v_fma(w1, x, b##r); \
            c##r = v_fma(w2, x, c##r); \
        } \
    }
        PL_EIGHT(PL_ADD_ROW)
#undef PL_ADD_ROW
    }
#define PL_KEEP(r) \
    if (r < rows) { \
        sums[r * every] = a##r; \
        if (tiles == 3) { \
            sums[r * every + 1] = b##r; \
            sums[r * every + 2] = c##r; \
        } \
    }
    PL_EIGHT(PL_KEEP)
#undef PL_KEEP
}

PL_INLINE void pl_float_tile(const int rows, const int tiles, const int bf16, const float *in, size_t stride,
                             const void *w, size_t k, const char *const *fetch, vf *sums)
{
    const size_t bytes = k * PL_LANES * (bf16 ? 2 : 4);
    if (PL_TOGETHER(rows))
        pl_float_tiles(rows, tiles, bf16, in, stride, w, k, fetch, sums, tiles);
    else
        for (int t = 0; t < tiles; t++)
            pl_float_tiles(rows, 1, bf16, in, stride, (const char *)w + (size_t)t * bytes, k, fetch + t, sums + t, tiles);
}

/* Rows row .. row + rows - 1 times tiles tile .. tile + tiles - 1, all counts known when compiled. */
PL_INLINE void pl_product_tile(const int rows, const int tiles, const int format, const pl_linear *w,
                               const pl_inputs *in, size_t row, size_t tile, const pl_sink *sink,
                               const char *const *fetch)
{
    size_t k = pl_padded((size_t)w->k, format);
    vf out[PL_ROWS * PL_GROUP];
    if (format == PL_INT8) {
        int32_t sums[PL_ROWS * PL_GROUP * PL_LANES];
        const uint8_t *data = (const uint8_t *)w->data + tile * PL_LANES * k;
        pl_int8_tile(rows, tiles, (const pl_input *)in->data + row * in->stride, in->stride, data, k, fetch, sums);
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < tiles; t++) {
                vf v = v_from_sums(sums + (r * tiles + t) * PL_LANES, in->offset[row + (size_t)r]);
                v = v_mul(v, v_load(w->scale + (tile + (size_t)t) * PL_LANES));
                out[r * tiles + t] = v_mul(v, v_set1(in->scale[row + (size_t)r]));
            }
    } else {
        size_t at = tile * PL_LANES * (size_t)w->k * (format == PL_BF16 ? 2 : 4);
        pl_float_tile(rows, tiles, format == PL_BF16, (const float *)in->data + row * in->stride, in->stride,
                      (const char *)w->data + at, (size_t)w->k, fetch, out);
    }
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < tiles; t++) {
            vf v = out[r * tiles + t];
            if (w->bias != NULL)
                v = v_add(v, v_load(w->bias + (tile + (size_t)t) * PL_LANES));
            pl_emit(sink, row + (size_t)r, tile + (size_t)t, v);
        }
}

typedef void (*pl_tile)(const pl_linear *, const pl_inputs *, size_t row, size_t tile, const pl_sink *,
                        const char *const *fetch);

#define PL_ONE_TILE(rows, tiles, format) \
    PL_NOINLINE void pl_tile_##rows##_##tiles##_##format(const pl_linear *w, const pl_inputs *in, size_t row, \
                                                         size_t tile, const pl_sink *sink, \
                                                         const char *const *fetch) \
    { \
        pl_product_tile(rows, tiles, format, w, in, row, tile, sink, fetch); \
    }
#define PL_ALL_TILES(rows, unused) \
    PL_ONE_TILE(rows, 1, PL_FP32) \
    PL_ONE_TILE(rows, 1, PL_BF16) \
    PL_ONE_TILE(rows, 1, PL_INT8) \
    PL_ONE_TILE(rows, 3, PL_FP32) \
    PL_ONE_TILE(rows, 3, PL_BF16) \
    PL_ONE_TILE(rows, 3, PL_INT8)
#define PL_TABLE(tiles, format) PL_NUMBERS(PL_ENTRY, tiles, format)
#define PL_ENTRY(rows, tiles, format) pl_tile_##rows##_##tiles##_##format,
PL_NUMBERS(PL_ALL_TILES, 0)

PL_INLINE size_t pl_tile_bytes(const pl_linear *w)
{
    static const size_t width[] = {4, 2, 1};
    return pl_padded((size_t)w->k, PL_INT8 * (w->format == PL_INT8)) * PL_LANES * width[w->format];
}

/* A group of tiles from `tile` on for all rows: its weights stay near while the rows pass in eights, and meanwhile
 * those of the next group are fetched, a third in each of the first three passes, or more if there are fewer.
 * Where a group is too large for that, weights are fetched a little ahead. */
static void pl_product_group(const pl_linear *w, const pl_inputs *in, size_t rows, size_t tile, size_t tiles,
                             const pl_sink *sink)
{
    static const pl_tile table[3][2][PL_ROWS] = {{{PL_TABLE(1, PL_FP32)}, {PL_TABLE(3, PL_FP32)}},
                                                 {{PL_TABLE(1, PL_BF16)}, {PL_TABLE(3, PL_BF16)}},
                                                 {{PL_TABLE(1, PL_INT8)}, {PL_TABLE(3, PL_INT8)}}};
    const size_t passes = (rows + PL_ROWS - 1) / PL_ROWS, bytes = pl_tile_bytes(w);
    const int large = bytes > PL_NEAR;
    const char *next = (const char *)w->data + tile * bytes + (large ? 4096 : tiles * bytes);
    for (size_t pass = 0; pass < passes; pass++) {
        size_t row = pass * PL_ROWS, count = rows - row < PL_ROWS ? rows - row : PL_ROWS;
        size_t first = pass < 2 ? pass : 2, last = pass + 1 < passes ? first : 2, middle = (first + last + 1) / 2;
        if (large)
            first = 0, middle = 1, last = 2;
        const char *fetch[PL_GROUP] = {next + first * bytes, next + middle * bytes, next + last * bytes};
        table[w->format][tiles == PL_GROUP][count - 1](w, in, row, tile, sink, fetch);
    }
}
#undef PL_ONE_TILE
#undef PL_ALL_TILES
#undef PL_TABLE
#undef PL_ENTRY

/* Inside a region; ends with a barrier. */
static void pl_product(pl_pool *pool, int thread, const pl_linear *w, const pl_inputs *in, size_t rows,
                       const pl_sink *sink)
{
    const size_t tiles = pl_round_up((size_t)w->n, PL_LANES) / PL_LANES, groups = (tiles + PL_GROUP - 1) / PL_GROUP;
    const size_t step = groups / (32 * (size_t)pl_pool_threads(pool)) + 1, pieces = (groups + step - 1) / step;
    for (int piece; (piece = pl_pool_claim(pool, thread, pieces)) >= 0;) {
        size_t tile = (size_t)piece * step * PL_GROUP, end = tile + step * PL_GROUP;
        end = end < tiles ? end : tiles;
        while (tile < end) {
            size_t count = tile + PL_GROUP <= end ? PL_GROUP : 1;
            pl_product_group(w, in, rows, tile, count, sink);
            tile += count;
        }
    }
    pl_pool_barrier(pool, thread);
}

#endif
