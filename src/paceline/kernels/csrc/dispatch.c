/* What Python calls: every function takes the path, found once by name. */
#include <stdlib.h>
#include <string.h>

#include "cpu.h"
#include "paceline.h"

extern const pl_path pl_path_portable;
#if defined(__x86_64__)
extern const pl_path pl_path_avx512, pl_path_avx2;
#endif

/* The path of that name, or with "" the best that the processor runs; NULL if it runs no such path. */
const pl_path *pl_find_path(const char *name)
{
#if defined(__x86_64__)
    const int cpu = pl_cpu();
    if (cpu >= PL_CPU_VNNI && (!*name || !strcmp(name, pl_path_avx512.name)))
        return &pl_path_avx512;
    if (cpu >= PL_CPU_AVX2 && (!*name || !strcmp(name, pl_path_avx2.name)))
        return &pl_path_avx2;
#endif
    return !*name || !strcmp(name, pl_path_portable.name) ? &pl_path_portable : NULL;
}

const char *pl_path_name(const pl_path *path) { return path->name; }

int pl_path_forward(const pl_path *path, pl_pool *pool, pl_scratch *scratch, const pl_model *model,
                    const pl_batch *batch, float *logits, float *hidden, float *const *taps)
{
    return path->forward(pool, scratch, model, batch, logits, hidden, taps);
}

int pl_path_linear(const pl_path *path, pl_pool *pool, pl_scratch *scratch, const pl_linear *linear,
                   const float *in, int32_t rows, float *out)
{
    return path->linear(pool, scratch, linear, in, rows, out);
}

void pl_path_int8_sums(const pl_path *path, const uint8_t *weights, const int8_t *in, int32_t rows, int32_t n,
                       int32_t k, int32_t *out)
{
    path->int8_sums(weights, in, rows, n, k, out);
}

void pl_path_activate(const pl_path *path, int32_t kind, const float *gate, const float *up, float *out, int32_t n)
{
    path->activate(kind, gate, up, out, n);
}

void pl_path_rotate(const pl_path *path, const float *in, float *out, int32_t n) { path->rotate(in, out, n); }

void pl_scratch_free(pl_scratch *scratch)
{
    free(scratch->memory);
    *scratch = (pl_scratch){0};
}
