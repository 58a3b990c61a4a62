/* A forward pass: one parallel region from the embedding to the logits, a barrier after each phase that others
 * need whole. One row (plain decoding) skips the barriers around small phases: each thread does them for itself. */
#ifndef PL_FORWARD_H
#define PL_FORWARD_H

#include "product.h"
#include "run.h"

/* Each row once, then a barrier; or, with a single row, once by every thread for itself. Then a product follows, and
 * others may have begun it before thread 0 is here. */
#define PL_EACH_ROW(run, pool, thread, body) \
    do { \
        if ((run)->solo) { \
            size_t row = 0, slot = (size_t)(thread); \
            pl_lap(run, pool, thread, PL_PRODUCTS, 1); \
            body; \
        } else { \
            for (int claimed; (claimed = pl_pool_claim(pool, thread, (run)->rows)) >= 0;) { \
                size_t row = (size_t)claimed, slot = row; \
                body; \
            } \
            pl_pool_barrier(pool, thread); \
        } \
    } while (0)

/* The inputs that this thread reads: its own slot where every thread works for itself. */
static pl_inputs pl_inputs_of(const pl_run *run, int thread)
{
    pl_inputs in = run->in;
    size_t skip = run->solo ? (size_t)thread : 0;
    in.data = (char *)in.data + skip * in.stride * (run->model->head.format == PL_INT8 ? sizeof(pl_input) : 4);
    in.scale += skip;
    in.offset += skip;
    return in;
}

static float *pl_stage(const pl_run *run, int thread)
{
    return (float *)(run->desks + (size_t)thread * run->desk_bytes);
}

static pl_desk pl_desk_of(const pl_run *run, int thread)
{
    float *at = pl_stage(run, thread) + run->stage_stride;
    pl_desk desk = {at, at + PL_PAIRS * PL_QUERY, NULL, NULL};
    desk.part = desk.scores + PL_PAIRS * PL_SPAN;
    desk.sums = desk.part + PL_PAIRS * run->part_stride;
    return desk;
}

static void pl_embed(const pl_run *run, size_t row, float *x)
{
    const pl_model *m = run->model;
    size_t hidden = (size_t)m->hidden, id = (size_t)run->batch->ids[row];
    float lanes[PL_LANES];
    vf scale = v_set1(m->embedding_scale != NULL ? m->embedding_scale[id] : 1.0f);
    for (size_t i = 0; i < hidden; i += PL_LANES) {
        size_t left = hidden - i;
        vf v;
        if (m->embedding_format == PL_FP32) {
            v = v_loadn((const float *)m->embedding + id * hidden + i, left);
        } else if (m->embedding_format == PL_BF16) {
            v = v_loadn_bf16((const uint16_t *)m->embedding + id * hidden + i, left);
        } else {
            const int8_t *from = (const int8_t *)m->embedding + id * hidden + i;
            for (size_t j = 0; j < PL_LANES; j++)
                lanes[j] = j < left ? (float)from[j] : 0.0f;
            v = left >= PL_LANES ? v_load_s8(from) : v_load(lanes);
            v = v_mul(v, scale);
        }
        v_storen(x + i, v_mul(v, v_set1(m->embedding_multiplier)), left);
    }
}

static void pl_norm_or_copy(const float *x, const float *norm, size_t n, float eps, float *out)
{
    if (norm != NULL)
        pl_norm(x, norm, n, eps, out);
    else
        memcpy(out, x, n * sizeof(float));
}

/* A draft head's row: embedding and feature side by side become the input of the first product. */
static void pl_embed_beside_feature(const pl_run *run, size_t row, int thread)
{
    const pl_model *m = run->model;
    size_t hidden = (size_t)m->hidden;
    const float *feature = run->batch->features + row * hidden;
    float *stage = pl_stage(run, thread), *beside = stage + hidden;
    pl_embed(run, row, beside);
    pl_norm_or_copy(beside, m->embed_norm, hidden, m->norm_eps, stage);
    pl_norm_or_copy(feature, m->hidden_norm, hidden, m->norm_eps, beside);
    memcpy(run->x + row * run->x_stride, m->normed_residual ? beside : feature, hidden * sizeof(float));
    pl_quantize(stage, 2 * hidden, m->head.format, run->in, row);
}

/* What a product left in `mid` is normed and joins the residual stream. */
static void pl_join(const pl_run *run, const float *norm, size_t row, int thread)
{
    const pl_model *m = run->model;
    size_t hidden = (size_t)m->hidden;
    float *x = run->x + row * run->x_stride, *stage = pl_stage(run, thread);
    vf multiplier = v_set1(m->residual_multiplier);
    pl_norm(run->mid + row * run->mid_stride, norm, hidden, m->norm_eps, stage);
    for (size_t i = 0; i < hidden; i += PL_LANES) {
        vf y = v_mul(v_loadn(stage + i, hidden - i), multiplier);
        v_storen(x + i, v_add(v_loadn(x + i, hidden - i), y), hidden - i);
    }
}

/* The residual stream becomes the input of a product. */
static void pl_enter(const pl_run *run, const float *norm, size_t row, size_t slot, int thread)
{
    const pl_model *m = run->model;
    size_t hidden = (size_t)m->hidden;
    float *stage = pl_stage(run, thread);
    pl_norm_or_copy(run->x + row * run->x_stride, norm, hidden, m->norm_eps, stage);
    pl_quantize(stage, hidden, m->head.format, run->in, slot);
}

/* Whether the input of a layer was there from the start. */
PL_INLINE int pl_reads_pair(const pl_model *m, int layer) { return layer == 0 && m->front == PL_PAIR; }

static void pl_begin_layer(const pl_run *run, int layer, size_t row, size_t slot, int thread)
{
    const pl_model *m = run->model;
    if (layer > 0 && m->layer[layer - 1].mlp_post_norm != NULL)
        pl_join(run, m->layer[layer - 1].mlp_post_norm, row, thread);
    if (run->taps[layer] != NULL && (!run->solo || thread == 0))
        memcpy(run->taps[layer] + row * (size_t)m->hidden, run->x + row * run->x_stride, (size_t)m->hidden * 4);
    if (layer < m->layers && !pl_reads_pair(m, layer))
        pl_enter(run, m->layer[layer].attn_norm, row, slot, thread);
}

static void pl_head_norm(const pl_run *run, float *head, const float *weight)
{
    if (weight != NULL)
        pl_norm(head, weight, (size_t)run->model->head_dim, run->model->norm_eps, head);
}

/* The key goes across its page, the value along it. */
static void pl_write_kv(const pl_run *run, const pl_layer *layer, size_t row, size_t segment, size_t head,
                        const float *key, const float *value)
{
    const pl_model *m = run->model;
    const pl_group *g = &run->batch->group[layer->group];
    size_t dim = (size_t)m->head_dim, index = (size_t)run->batch->storage[row], lane = index % PL_PAGE;
    size_t page = (size_t)g->table[segment * (size_t)g->pages + index / PL_PAGE];
    size_t at = ((page * (size_t)g->layers + (size_t)layer->group_layer) * (size_t)m->kv_heads + head) * dim * PL_PAGE;
    if (m->kv_bf16) {
        uint16_t *keys = (uint16_t *)g->keys + at + lane, *values = (uint16_t *)g->values + at + lane * dim;
        for (size_t d = 0; d < dim; d++) {
            keys[d * PL_PAGE] = pl_to_bf16(key[d]);
            values[d] = pl_to_bf16(value[d]);
        }
    } else {
        float *keys = (float *)g->keys + at + lane, *values = (float *)g->values + at + lane * dim;
        for (size_t d = 0; d < dim; d++)
            keys[d * PL_PAGE] = key[d];
        memcpy(values, value, dim * sizeof(float));
    }
}

/* Norm and rotary positions of one key head and its queries, which are scaled here; key and value are written. */
static void pl_place_head(const pl_run *run, const pl_layer *layer, size_t row, size_t segment, size_t head)
{
    const pl_model *m = run->model;
    size_t dim = (size_t)m->head_dim, heads = (size_t)m->heads, kv_heads = (size_t)m->kv_heads;
    size_t group = heads / kv_heads, half = (size_t)layer->rope_dims / 2;
    size_t turn = (size_t)run->batch->positions[row] * half;
    float *q = run->qkv + row * run->qkv_stride, *k = q + (heads + head) * dim, *v = k + kv_heads * dim;
    vf scale = v_set1(m->attention_scale);
    int head_norm = m->qk_norm == PL_QK_HEAD;
    q += head * group * dim;
    for (size_t h = 0; h <= group; h++) {
        float *at = h < group ? q + h * dim : k;
        if (head_norm)
            pl_head_norm(run, at, h < group ? layer->q_norm : layer->k_norm);
        if (half > 0)
            pl_rope(at, layer->cos + turn, layer->sin + turn, 2 * half);
    }
    for (size_t i = 0; i < group * dim; i += PL_LANES)
        v_storen(q + i, v_mul(v_loadn(q + i, group * dim - i), scale), group * dim - i);
    pl_write_kv(run, layer, row, segment, head, k, v);
}

/* A unit is up to 16 rows (whose keys share cache lines) of one key head, or of all where the norm spans them. */
static void pl_place(const pl_run *run, pl_pool *pool, const pl_layer *layer, int thread)
{
    const pl_model *m = run->model;
    size_t kv_heads = (size_t)m->kv_heads, full = m->qk_norm == PL_QK_FULL, at_once = run->rows > 32 ? 16 : 2;
    size_t across = full ? 1 : kv_heads, blocks = (run->rows + at_once - 1) / at_once;
    for (int unit; (unit = pl_pool_claim(pool, thread, (blocks * across))) >= 0;) {
        size_t row = (size_t)unit / across * at_once, end = row + at_once < run->rows ? row + at_once : run->rows;
        for (; row < end; row++) {
            size_t segment = pl_segment_of(run->batch, row);
            if (full) {
                size_t dim = (size_t)m->head_dim, queries = (size_t)m->heads * dim;
                float *q = run->qkv + row * run->qkv_stride;
                pl_norm(q, layer->q_norm, queries, m->norm_eps, q);
                pl_norm(q + queries, layer->k_norm, kv_heads * dim, m->norm_eps, q + queries);
                for (size_t h = 0; h < kv_heads; h++)
                    pl_place_head(run, layer, row, segment, h);
            } else {
                pl_place_head(run, layer, row, segment, (size_t)unit % across);
            }
        }
    }
    pl_pool_barrier(pool, thread);
}

/* One chunk of all pairs of a block; merged into the desk's sums, or left as parts. */
static void pl_attend_chunk(const pl_run *run, const pl_layer *layer, const pl_unit *unit, const pl_view *view,
                            const pl_desk *desk, int chunk, int *merged)
{
    const pl_block *block = &run->blocks[unit->block];
    const pl_model *m = run->model;
    size_t heads = (size_t)m->heads, group = heads / (size_t)m->kv_heads, dim = view->dim;
    pl_span spans[PL_BLOCK];
    const pl_span *seen[PL_PAIRS];
    float *out[PL_PAIRS], *sums[PL_PAIRS];
    int *counts[PL_PAIRS], pairs = 0;
    for (int r = 0; r < block->rows; r++)
        spans[r] = pl_span_of(run->batch, (size_t)(block->row + r), layer->window, chunk);
    for (size_t p = 0; p < (size_t)block->rows * group; p++) {
        size_t r = p / group, row = (size_t)block->row + r, head = (size_t)unit->head * group + p % group;
        if (spans[r].hi > spans[r].lo) {
            const float *query = run->qkv + row * run->qkv_stride + head * dim;
            memcpy(desk->queries + (size_t)pairs * PL_QUERY, query, dim * sizeof(float));
            seen[pairs] = &spans[r];
            sums[pairs] = desk->sums + p * run->part_stride;
            counts[pairs] = &merged[r];
            out[pairs] = !run->split ? desk->part + (size_t)pairs * run->part_stride
                                         : run->part + ((row * heads + head) * run->chunks + (size_t)chunk) * run->part_stride;
            pairs++;
        }
        if (pairs == PL_PAIRS || (pairs > 0 && p + 1 == (size_t)block->rows * group)) {
            pl_chunk(pairs, view, (size_t)chunk * PL_CHUNK, seen, desk, out);
            for (int i = 0; i < pairs && !run->split; i++)
                pl_merge(sums[i], out[i], run->padded, *counts[i] == 0);
            pairs = 0;
        }
    }
    for (int r = 0; r < block->rows; r++)
        merged[r] += spans[r].hi > spans[r].lo;
}

static void pl_attend_unit(const pl_run *run, const pl_layer *layer, const pl_unit *unit, int thread)
{
    const pl_model *m = run->model;
    const pl_block *block = &run->blocks[unit->block];
    const pl_group *g = &run->batch->group[layer->group];
    size_t bytes = m->kv_bf16 ? 2 : 4, dim = (size_t)m->head_dim, head_bytes = dim * PL_PAGE * bytes;
    size_t at = ((size_t)layer->group_layer * (size_t)m->kv_heads + (size_t)unit->head) * head_bytes;
    size_t heads = (size_t)m->heads, group = heads / (size_t)m->kv_heads;
    pl_view view = {(const char *)g->keys + at, (const char *)g->values + at,
                    (ptrdiff_t)(g->layers * m->kv_heads) * (ptrdiff_t)head_bytes,
                    g->table + (size_t)block->segment * (size_t)g->pages, (size_t)g->pages, m->kv_bf16, dim, run->padded,
                    m->attention_softcap};
    pl_desk desk = pl_desk_of(run, thread);
    int merged[PL_BLOCK] = {0};
    for (int chunk = unit->first; chunk < unit->end; chunk++)
        pl_attend_chunk(run, layer, unit, &view, &desk, chunk, merged);
    for (size_t p = 0; !run->split && p < (size_t)block->rows * group; p++) {
        size_t row = (size_t)block->row + p / group, head = (size_t)unit->head * group + p % group;
        pl_finish(desk.sums + p * run->part_stride, dim, run->padded, run->attn + row * run->attn_stride + head * dim);
    }
}

/* The row's attention becomes the input of the output product; chunks that were apart are merged in order. */
static void pl_leave_attention(const pl_run *run, const pl_layer *layer, size_t row, size_t slot, int thread)
{
    const pl_model *m = run->model;
    size_t dim = (size_t)m->head_dim, heads = (size_t)m->heads;
    float *stage = pl_stage(run, thread), *sum = pl_desk_of(run, thread).sums;
    if (!run->split) {
        memcpy(stage, run->attn + row * run->attn_stride, heads * dim * sizeof(float));
    } else {
        int length = run->batch->positions[row] + 1, window = layer->window;
        size_t first = window > 0 && length > window ? (size_t)(length - window) / PL_CHUNK : 0;
        size_t last = (size_t)(length - 1) / PL_CHUNK;
        for (size_t h = 0; h < heads; h++) {
            const float *part = run->part + (row * heads + h) * run->chunks * run->part_stride;
            for (size_t c = first; c <= last; c++)
                pl_merge(sum, part + c * run->part_stride, run->padded, c == first);
            pl_finish(sum, dim, run->padded, stage + h * dim);
        }
    }
    pl_quantize(stage, heads * dim, m->head.format, run->in, slot);
}

static void pl_begin_mlp(const pl_run *run, const pl_layer *layer, size_t row, size_t slot, int thread)
{
    if (layer->attn_post_norm != NULL)
        pl_join(run, layer->attn_post_norm, row, thread);
    pl_enter(run, layer->mlp_norm, row, slot, thread);
}

static void pl_gate(const pl_run *run, size_t row, size_t slot, int thread)
{
    const pl_model *m = run->model;
    size_t n = (size_t)m->intermediate;
    float *stage = pl_stage(run, thread), *gate = run->mid + row * run->mid_stride;
    pl_activate(m->activation, gate, gate + n, stage, n);
    pl_quantize(stage, n, m->head.format, run->in, slot);
}

/* What lies between products is small operators, but for attention, which has a lap of its own. */
static void pl_run_product(const pl_run *run, pl_pool *pool, int thread, const pl_linear *w, const pl_inputs *in,
                           size_t rows, const pl_sink *sink)
{
    pl_lap(run, pool, thread, PL_SMALL, run->solo);
    pl_product(pool, thread, w, in, rows, sink);
    pl_lap(run, pool, thread, PL_PRODUCTS, 0);
}

/* A product that ends in the residual stream, or in `mid` where a norm comes first. */
static void pl_product_back(const pl_run *run, pl_pool *pool, int thread, const pl_linear *w, const pl_inputs *in,
                            const float *post_norm)
{
    pl_sink add = {run->x, run->x_stride, 0, PL_ADD, run->model->residual_multiplier, 0.0f};
    pl_sink store = {run->mid, run->mid_stride, 0, PL_STORE, 1.0f, 0.0f};
    pl_run_product(run, pool, thread, w, in, run->rows, post_norm != NULL ? &store : &add);
}

static void pl_run_front(const pl_run *run, pl_pool *pool, int thread)
{
    const pl_model *m = run->model;
    pl_sink x = {run->x, run->x_stride, 0, PL_STORE, 1.0f, 0.0f};
    for (int claimed; (claimed = pl_pool_claim(pool, thread, run->rows)) >= 0;) {
        size_t row = (size_t)claimed;
        if (m->front == PL_EMBED)
            pl_embed(run, row, run->x + row * run->x_stride);
        else
            pl_embed_beside_feature(run, row, thread);
    }
    pl_pool_barrier(pool, thread);
    pl_lap(run, pool, thread, PL_SMALL, 0);
    if (m->front == PL_FUSE)
        pl_run_product(run, pool, thread, &m->fc, &run->in, run->rows, &x);
}

static void pl_run_layer(const pl_run *run, pl_pool *pool, int index, int thread)
{
    const pl_layer *layer = &run->model->layer[index];
    pl_inputs in = pl_inputs_of(run, thread);
    pl_sink qkv = {run->qkv, run->qkv_stride, 0, PL_STORE, 1.0f, 0.0f};
    pl_sink mid = {run->mid, run->mid_stride, 0, PL_STORE, 1.0f, 0.0f};

    PL_EACH_ROW(run, pool, thread, pl_begin_layer(run, index, row, slot, thread));
    pl_run_product(run, pool, thread, &layer->qkv, pl_reads_pair(run->model, index) ? &run->in : &in, run->rows, &qkv);
    pl_place(run, pool, layer, thread);
    pl_lap(run, pool, thread, PL_SMALL, 0);
    for (int unit; (unit = pl_pool_claim(pool, thread, run->unit_count)) >= 0;)
        pl_attend_unit(run, layer, &run->units[unit], thread);
    pl_pool_barrier(pool, thread);
    pl_lap(run, pool, thread, PL_ATTENTION, 0);
    PL_EACH_ROW(run, pool, thread, pl_leave_attention(run, layer, row, slot, thread));
    pl_lap(run, pool, thread, PL_ATTENTION, run->solo);
    pl_product_back(run, pool, thread, &layer->o, &in, layer->attn_post_norm);
    PL_EACH_ROW(run, pool, thread, pl_begin_mlp(run, layer, row, slot, thread));
    pl_run_product(run, pool, thread, &layer->gate_up, &in, run->rows, &mid);
    PL_EACH_ROW(run, pool, thread, pl_gate(run, row, slot, thread));
    pl_product_back(run, pool, thread, &layer->down, &in, layer->mlp_post_norm);
}

static void pl_run_head(const pl_run *run, pl_pool *pool, int thread)
{
    const pl_model *m = run->model;
    size_t hidden = (size_t)m->hidden, scored = (size_t)run->batch->scored;
    size_t ids = (size_t)m->head.n;
    pl_sink sink = {run->logits, ids, ids, PL_LOGITS, m->logit_multiplier, m->logit_softcap};
    for (int claimed; (claimed = pl_pool_claim(pool, thread, scored)) >= 0;) {
        size_t i = (size_t)claimed;
        float *stage = pl_stage(run, thread);
        const float *x = run->x + (size_t)run->batch->score[i] * run->x_stride;
        pl_norm_or_copy(x, m->norm, hidden, m->norm_eps, stage);
        memcpy(run->hidden + i * hidden, stage, hidden * sizeof(float));
        pl_quantize(stage, hidden, m->head.format, run->in, i);
    }
    pl_pool_barrier(pool, thread);
    pl_run_product(run, pool, thread, &m->head, &run->in, scored, &sink);
}

static void pl_forward_region(void *arg, pl_pool *pool, int thread)
{
    const pl_run *run = arg;
    if (thread == 0 && run->watch != NULL)
        pl_pool_watch(pool);
    pl_run_front(run, pool, thread);
    for (int layer = 0; layer < run->model->layers; layer++)
        pl_run_layer(run, pool, layer, thread);
    PL_EACH_ROW(run, pool, thread, pl_begin_layer(run, run->model->layers, row, slot, thread));
    if (run->batch->scored > 0)
        pl_run_head(run, pool, thread);
}

static int pl_forward(pl_pool *pool, pl_scratch *scratch, const pl_model *m, const pl_batch *batch, float *logits,
                      float *hidden, float *const *taps)
{
    size_t threads = (size_t)pl_pool_threads(pool), rows = (size_t)batch->rows;
    size_t heads_width = (size_t)(m->heads + 2 * m->kv_heads) * (size_t)m->head_dim;
    size_t first = (size_t)m->hidden * (m->front == PL_EMBED ? 1 : 2);
    size_t wide = pl_max(pl_max(first, (size_t)m->intermediate), (size_t)(m->heads * m->head_dim));
    pl_watch watch = {batch->seconds, batch->seconds != NULL ? pl_now() : 0.0};
    int group = m->heads / m->kv_heads, status = pl_check(m, batch);
    pl_run run = {.model = m, .batch = batch, .logits = logits, .hidden = hidden, .taps = taps, .rows = rows};
    if (status != PL_OK || rows == 0)
        return status;
    run.watch = batch->seconds != NULL ? &watch : NULL;
    run.solo = rows == 1 && m->layer[0].attn_post_norm == NULL;
    run.slots = pl_max(rows, threads);
    run.x_stride = pl_round_up((size_t)m->hidden, 64);
    run.qkv_stride = pl_round_up(heads_width, PL_LANES) + PL_LANES;
    run.attn_stride = pl_round_up((size_t)(m->heads * m->head_dim), 64);
    run.mid_stride = pl_round_up(pl_max(2 * (size_t)m->intermediate, (size_t)m->hidden), PL_LANES) + PL_LANES;
    run.stage_stride = pl_round_up(wide, 64);
    run.padded = pl_round_up((size_t)m->head_dim, PL_LANES);
    run.part_stride = run.padded + PL_LANES;
    run.desk_bytes = pl_round_up(pl_desk_floats(&run, (size_t)group) * 4, 4096) + 256;
    pl_plan_units(&run, (int)threads, 0);
    status = pl_grow(scratch, pl_lay_out(&run, threads, NULL));
    if (status != PL_OK)
        return status;
    pl_lay_out(&run, threads, scratch->memory);
    pl_plan_units(&run, (int)threads, 1);
    pl_pool_run(pool, pl_forward_region, &run);
    pl_lap(&run, pool, 0, PL_SMALL, 1);
    return PL_OK;
}

#endif
