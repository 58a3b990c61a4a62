/* The structures that Python fills (paceline/kernels/native.py mirrors them) and what each path offers. */
#ifndef PACELINE_H
#define PACELINE_H

#include <stddef.h>
#include <stdint.h>

#include "pool.h"

#define PL_PAGE 16
#define PL_MAX_DIM 512 /* of a head */

enum { PL_FP32, PL_BF16, PL_INT8 };
enum { PL_SILU, PL_GELU, PL_GELU_TANH };
enum { PL_QK_NONE, PL_QK_HEAD, PL_QK_FULL };
/* What comes before the layers: the embedding; or, in a draft head, the embedding beside a feature of the row, which a
 * product makes one, or which layer 0 reads side by side while the feature alone is the residual stream. */
enum { PL_EMBED, PL_FUSE, PL_PAIR };
enum { PL_OK, PL_NO_MEMORY, PL_BAD_ID, PL_BAD_PAGE, PL_BAD_POSITION, PL_BAD_SCORE };
enum { PL_PRODUCTS, PL_ATTENTION, PL_SMALL, PL_PARTS };

/* out[n] = sum over k of in[k] w[n][k], + bias[n]; w lies as [n / 16][k][16], in int8 as [n / 16][k / 4][16][4]
 * with 128 added, k then padded to a multiple of 64 and rotated. scale and bias are padded to 16. */
typedef struct {
    const void *data;
    const float *scale, *bias;
    int32_t n, k, format, pad;
} pl_linear;

typedef struct {
    pl_linear qkv, o, gate_up, down;
    const float *attn_norm, *attn_post_norm, *mlp_norm, *mlp_post_norm, *q_norm, *k_norm; /* NULL where absent */
    const float *cos, *sin;     /* [positions, rope_dims / 2] */
    int32_t rope_dims, window;  /* 0: none */
    int32_t group, group_layer; /* where its keys and values lie */
} pl_layer;

typedef struct {
    const pl_layer *layer;
    const void *embedding;
    const float *embedding_scale, *norm;      /* a draft head may lack the norm: NULL */
    const float *embed_norm, *hidden_norm;   /* of a draft head, NULL where absent */
    pl_linear head, fc;
    int32_t layers, hidden, intermediate, heads, kv_heads, head_dim, positions;
    int32_t ids; /* rows of the embedding; the head has as many outputs as ids may be emitted */
    int32_t activation, qk_norm, kv_bf16, embedding_format;
    int32_t front, normed_residual; /* PL_PAIR: whether it is the normed feature that goes on */
    float norm_eps, attention_scale, attention_softcap, logit_softcap; /* a cap of 0: none */
    float embedding_multiplier, residual_multiplier, logit_multiplier, pad;
} pl_model;

typedef struct {
    void *keys, *values;
    const int32_t *table; /* [segments, pages] */
    int64_t layers;
    int32_t pages, slab_pages;
} pl_group;

typedef struct {
    const int64_t *ids, *visible, *score;
    const int32_t *positions, *starts, *storage, *context;
    const pl_group *group;
    const float *features; /* [rows, hidden] for a draft head */
    double *seconds; /* [PL_PARTS], to which the pass adds what its parts took; NULL: no clock is read */
    int32_t rows, segments, scored, groups;
} pl_batch;

/* Scratch that grows to the largest batch seen. */
typedef struct {
    void *memory;
    size_t bytes;
} pl_scratch;

typedef struct {
    const char *name;
    /* taps: for each layer, and once more for the final norm, NULL or [rows, hidden] for the residual stream */
    int (*forward)(pl_pool *, pl_scratch *, const pl_model *, const pl_batch *, float *logits, float *hidden,
                   float *const *taps);
    int (*linear)(pl_pool *, pl_scratch *, const pl_linear *, const float *in, int32_t rows, float *out);
    void (*int8_sums)(const uint8_t *weights, const int8_t *in, int32_t rows, int32_t n, int32_t k, int32_t *out);
    void (*activate)(int32_t kind, const float *gate, const float *up, float *out, int32_t n);
    void (*rotate)(const float *in, float *out, int32_t n);
} pl_path;

#endif
