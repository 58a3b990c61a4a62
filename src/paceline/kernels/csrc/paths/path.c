/* Everything that depends on the instruction set; compiled once for each, with PL_AVX512, PL_AVX2 or neither. */
#define _GNU_SOURCE

/* gcc's elimination of partial redundancies copies the sums of a tile from register to register. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-pre")
#endif

#include "../forward.h"

typedef struct {
    const pl_linear *linear;
    const float *in;
    float *out, *stages;
    size_t rows, stride;
    pl_inputs inputs;
} pl_linear_run;

static void pl_linear_region(void *arg, pl_pool *pool, int thread)
{
    const pl_linear_run *run = arg;
    size_t k = (size_t)run->linear->k, n = (size_t)run->linear->n;
    float *stage = run->stages + (size_t)thread * run->stride;
    pl_sink sink = {run->out, n, n, PL_LOGITS, 1.0f, 0.0f};
    for (int claimed; (claimed = pl_pool_claim(pool, thread, run->rows)) >= 0;) {
        size_t row = (size_t)claimed;
        memcpy(stage, run->in + row * k, k * sizeof(float));
        pl_quantize(stage, k, run->linear->format, run->inputs, row);
    }
    pl_pool_barrier(pool, thread);
    pl_product(pool, thread, run->linear, &run->inputs, run->rows, &sink);
}

/* out [rows, n] = in [rows, k] times the matrix */
static int pl_linear_rows(pl_pool *pool, pl_scratch *scratch, const pl_linear *linear, const float *in,
                          int32_t count, float *out)
{
    size_t rows = (size_t)count, threads = (size_t)pl_pool_threads(pool);
    size_t stride = pl_round_up((size_t)linear->k, 64), floats = (rows + threads) * stride + 2 * rows + 64;
    if (rows == 0)
        return PL_OK;
    if (pl_grow(scratch, floats * sizeof(float)) != PL_OK)
        return PL_NO_MEMORY;
    float *memory = scratch->memory;
    pl_linear_run run = {linear, in, out, memory, rows, stride, {0}};
    run.inputs = (pl_inputs){memory + threads * stride, memory + (threads + rows) * stride,
                             (int32_t *)(memory + (threads + rows) * stride + rows), stride};
    pl_pool_run(pool, pl_linear_region, &run);
    return PL_OK;
}

/* out [rows, n padded to 16] = plain sums of weights (packed, k a multiple of 64) times 8-bit inputs [rows, k] */
static void pl_int8_sums(const uint8_t *weights, const int8_t *in, int32_t rows, int32_t n, int32_t k, int32_t *out)
{
    size_t wide = (size_t)k, columns = pl_round_up((size_t)n, PL_LANES);
    pl_input *row = malloc(wide * sizeof(pl_input) * PL_ROWS);
    for (size_t r = 0; row != NULL && r < (size_t)rows; r += PL_ROWS) {
        size_t count = (size_t)rows - r < PL_ROWS ? (size_t)rows - r : PL_ROWS;
        for (size_t i = 0; i < count * wide; i++)
            row[i] = in[r * wide + i];
        for (size_t tile = 0; tile < columns / PL_LANES; tile++) {
            int32_t sums[PL_ROWS * PL_LANES];
            const uint8_t *at = weights + tile * PL_LANES * wide;
            const char *fetch[PL_GROUP] = {(const char *)at, (const char *)at, (const char *)at};
            if (count == PL_ROWS)
                pl_int8_tile(PL_ROWS, 1, row, wide, at, wide, fetch, sums);
            else
                for (size_t i = 0; i < count; i++)
                    pl_int8_tile(1, 1, row + i * wide, wide, at, wide, fetch, sums + i * PL_LANES);
            for (size_t i = 0; i < count; i++)
                memcpy(out + (r + i) * columns + tile * PL_LANES, sums + i * PL_LANES, PL_LANES * sizeof(int32_t));
        }
    }
    free(row);
}

static void pl_activate_row(int32_t kind, const float *gate, const float *up, float *out, int32_t n)
{
    pl_activate(kind, gate, up, out, (size_t)n);
}

static void pl_rotate_row(const float *in, float *out, int32_t n) { pl_rotate(in, out, (size_t)n); }

#define PL_EXPORT(symbol, label) \
    const pl_path symbol = {label, pl_forward, pl_linear_rows, pl_int8_sums, pl_activate_row, pl_rotate_row};
#if defined(PL_AVX512)
PL_EXPORT(pl_path_avx512, "avx512-vnni")
#elif defined(PL_AVX2)
PL_EXPORT(pl_path_avx2, "avx2")
#else
PL_EXPORT(pl_path_portable, "portable")
#endif
