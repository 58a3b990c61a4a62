/* What one forward pass works with: its buffers, and how attention is cut into units of work. */
#ifndef PL_RUN_H
#define PL_RUN_H

#include <stdlib.h>

#include "attention.h"

/* Rows row .. row + rows - 1 of a segment. */
typedef struct {
    int32_t row, rows, segment;
} pl_block;

/* Chunks first .. end - 1 of a block and a key head. */
typedef struct {
    int32_t block, head, first, end;
} pl_unit;

/* Of a pass whose parts are timed. */
typedef struct {
    double *seconds; /* [PL_PARTS] */
    double since;    /* when the last part ended */
} pl_watch;

typedef struct {
    const pl_model *model;
    const pl_batch *batch;
    float *logits, *hidden;
    float *const *taps;
    size_t rows, slots, x_stride, qkv_stride, attn_stride, mid_stride, stage_stride, padded, part_stride, chunks;
    float *x;    /* the residual stream */
    float *qkv;  /* queries, keys, values */
    float *attn; /* what attention gives */
    float *mid;  /* gate and up; and what waits for a norm before it joins the residual stream */
    float *part; /* [row][head][chunk][o, m, l] where the chunks of a row are spread over units */
    pl_inputs in;
    char *desks; /* scratch of each thread */
    size_t desk_bytes;
    pl_block *blocks;
    pl_unit *units;
    size_t block_count, unit_count, span; /* chunks of a unit */
    int solo, split;
    pl_watch *watch; /* NULL, or what thread 0 keeps */
} pl_run;

/* All since the last lap was this part: until now by thread 0's own clock, or until the last barrier opened. */
PL_INLINE void pl_lap(const pl_run *run, const pl_pool *pool, int thread, int part, int own)
{
    pl_watch *watch = run->watch;
    if (watch == NULL || thread != 0)
        return;
    double end = own ? pl_now() : pl_pool_opened(pool);
    watch->seconds[part] += end - watch->since;
    watch->since = end;
}

static void *pl_take(char **at, size_t bytes)
{
    void *taken = *at;
    *at += pl_round_up(bytes, 64);
    return taken;
}

PL_INLINE size_t pl_max(size_t a, size_t b) { return a > b ? a : b; }

static size_t pl_desk_floats(const pl_run *run, size_t group)
{
    return run->stage_stride + PL_PAIRS * PL_QUERY + PL_PAIRS * PL_SPAN + PL_PAIRS * run->part_stride +
           PL_BLOCK * group * run->part_stride + 64;
}

/* Lays the buffers out from `at` on; with at = NULL only their total size counts. */
static size_t pl_lay_out(pl_run *run, size_t threads, char *memory)
{
    const pl_model *m = run->model;
    char *at = memory;
    size_t rows = run->rows, slots = run->slots, heads = (size_t)m->heads;
    run->x = pl_take(&at, rows * run->x_stride * 4);
    run->qkv = pl_take(&at, rows * run->qkv_stride * 4);
    run->attn = pl_take(&at, rows * run->attn_stride * 4);
    run->mid = pl_take(&at, rows * run->mid_stride * 4);
    run->part = pl_take(&at, run->split ? rows * heads * run->chunks * run->part_stride * 4 : 0);
    run->in.stride = run->stage_stride;
    run->in.data = pl_take(&at, slots * run->stage_stride * 4);
    run->in.scale = pl_take(&at, slots * 4);
    run->in.offset = pl_take(&at, slots * 4);
    run->desks = pl_take(&at, threads * run->desk_bytes);
    run->blocks = pl_take(&at, run->block_count * sizeof(pl_block));
    run->units = pl_take(&at, run->unit_count * sizeof(pl_unit));
    return (size_t)(at - memory);
}

static int pl_grow(pl_scratch *scratch, size_t bytes)
{
    if (bytes <= scratch->bytes)
        return PL_OK;
    void *memory = NULL;
    bytes += bytes / 8;
    free(scratch->memory);
    scratch->memory = NULL;
    scratch->bytes = 0;
    if (posix_memalign(&memory, 4096, bytes) != 0)
        return PL_NO_MEMORY;
    memset(memory, 0, bytes);
    scratch->memory = memory;
    scratch->bytes = bytes;
    return PL_OK;
}

static size_t pl_segment_of(const pl_batch *batch, size_t row)
{
    size_t low = 0, high = (size_t)batch->segments;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if ((size_t)batch->starts[middle] <= row)
            low = middle;
        else
            high = middle;
    }
    return low;
}

static size_t pl_block_chunks(const pl_batch *batch, size_t row, size_t rows)
{
    int32_t last = 0;
    for (size_t r = row; r < row + rows; r++)
        last = batch->positions[r] > last ? batch->positions[r] : last;
    return (size_t)last / PL_CHUNK + 1;
}

/* Counts blocks and units, and writes them once there is room; later blocks, which see more keys, come first. */
static void pl_plan_units(pl_run *run, int threads, int write)
{
    const pl_batch *b = run->batch;
    size_t kv_heads = (size_t)run->model->kv_heads, blocks = 0, units = 0, all = 0;
    for (int32_t s = b->segments - 1; s >= 0; s--) {
        size_t start = (size_t)b->starts[s], rows = (size_t)b->starts[s + 1] - start;
        for (size_t n = (rows + PL_BLOCK - 1) / PL_BLOCK; n-- > 0; blocks++) {
            size_t row = start + n * PL_BLOCK, count = rows - n * PL_BLOCK;
            count = count < PL_BLOCK ? count : PL_BLOCK;
            size_t chunks = pl_block_chunks(b, row, count);
            all += chunks * kv_heads;
            if (!write) {
                run->chunks = pl_max(run->chunks, chunks);
                continue;
            }
            run->blocks[blocks] = (pl_block){(int32_t)row, (int32_t)count, s};
            for (size_t h = 0; h < kv_heads; h++)
                for (size_t c = 0; c < chunks; c += run->span) {
                    size_t end = c + run->span < chunks ? c + run->span : chunks;
                    run->units[units++] = (pl_unit){(int32_t)blocks, (int32_t)h, (int32_t)c, (int32_t)end};
                }
        }
    }
    if (write) {
        run->unit_count = units;
        return;
    }
    run->split = blocks * kv_heads < 8 * (size_t)threads;
    run->span = run->split ? pl_max(1, all / (16 * (size_t)threads)) : run->chunks;
    run->block_count = blocks;
    run->unit_count = all; /* at most */
}

static int pl_has_page(const pl_group *g, int32_t segment, int32_t index)
{
    if (index < 0 || index / PL_PAGE >= g->pages)
        return 0;
    int32_t page = g->table[(size_t)segment * (size_t)g->pages + (size_t)(index / PL_PAGE)];
    return page >= 0 && page < g->slab_pages;
}

/* Ids, positions and pages that would be read or written outside their bounds. Of a context the last page counts:
 * those before a window may be gone. */
static int pl_check(const pl_model *m, const pl_batch *b)
{
    for (int32_t r = 0; r < b->rows; r++) {
        if (b->ids[r] < 0 || b->ids[r] >= m->ids)
            return PL_BAD_ID;
        if (b->positions[r] < 0 || b->positions[r] >= m->positions)
            return PL_BAD_POSITION;
    }
    for (int32_t i = 0; i < b->scored; i++)
        if (b->score[i] < 0 || b->score[i] >= b->rows)
            return PL_BAD_SCORE;
    for (int32_t s = 0; s < b->segments; s++)
        for (int32_t r = b->starts[s]; r < b->starts[s + 1]; r++)
            for (int32_t g = 0; g < b->groups; g++)
                if (!pl_has_page(&b->group[g], s, b->storage[r]) ||
                    (b->context[r] > 0 && !pl_has_page(&b->group[g], s, b->context[r] - 1)))
                    return PL_BAD_PAGE;
    return PL_OK;
}

#endif
