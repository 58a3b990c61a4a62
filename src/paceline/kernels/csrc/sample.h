/* What sample.c offers; paceline/kernels/sample.py mirrors it. A path is 0 (portable), 1 (AVX2) or 2 (AVX-512). */
#ifndef PL_SAMPLE_H
#define PL_SAMPLE_H

#include <stdint.h>

/* In place of a token: a row of nothing but -inf, a row with NaN or +inf. */
enum { PL_NO_TOKEN = -1, PL_NOT_FINITE = -2 };

/* draw.py's Filter: scale is 1 / temperature, reach is temperature x log(min_p). */
typedef struct {
    double scale, top_p, reach;
    int64_t top_k;
} pl_filter;

typedef struct {
    int64_t total, rank, listed; /* the mass of the row in units of 2**-40, the rank of the token, from 1 */
    float top, pad;
} pl_report;

/* Scratch: the functions that take it need room for one more than a row has tokens. */
typedef struct {
    uint64_t rank;
    int64_t mass;
} pl_candidate;

int32_t pl_sample_path(void);
void pl_argmax(int32_t path, const float *x, int64_t rows, int64_t stride, int64_t n, int64_t *out);
void pl_draw(int32_t path, const float *x, int64_t rows, int64_t stride, int64_t n, const pl_filter *filter,
             const uint64_t *keys, pl_candidate *room, int64_t *out);
int64_t pl_logprobs(int32_t path, const float *x, int64_t n, int64_t token, int64_t k, pl_candidate *room,
                    pl_report *report, int64_t *ids);

/* For each row the first count tokens of the race among those that the filter keeps, in falling order, at no
 * temperature (NULL) by logit alone, and their chances; found has how many there are, or why there are none. */
void pl_children(int32_t path, const float *x, int64_t rows, int64_t stride, int64_t n, const int64_t *ids,
                 const pl_filter *filter, const uint64_t *keys, int64_t count, pl_candidate *room, int64_t *tokens,
                 double *chances, int64_t *found);
/* The count highest tokens of each row, in falling order; returns how many rows were filled: it stops at one that is
 * no row of logits, or that has fewer possible tokens. Scores is scratch for count numbers. */
int64_t pl_top(int32_t path, const float *x, int64_t rows, int64_t stride, int64_t n, int64_t count,
               pl_candidate *room, double *scores, int64_t *out);
/* The probabilities, or the logits over the temperature, of the tokens that the filter keeps; the others' are left as
 * they are. */
int64_t pl_shares(int32_t path, const float *x, int64_t n, const pl_filter *filter, pl_candidate *room, double *out);
int64_t pl_processed(int32_t path, const float *x, int64_t n, const pl_filter *filter, pl_candidate *room, float *out);
/* The first count tokens of the race by log q + noise, where q is not 0, in falling order; returns how many. */
int64_t pl_race(int32_t path, const double *q, int64_t n, uint64_t key, int64_t count, pl_candidate *room,
                int64_t *tokens, double *scores);
void pl_uniforms(uint64_t key, const int64_t *ids, int64_t n, double *out);

#endif
