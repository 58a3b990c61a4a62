/* The noise of noise.py: a pure function of a key and a token id. */
#ifndef PL_NOISE_H
#define PL_NOISE_H

#include "elementary.h"

static const uint64_t GOLDEN = 0x9e3779b97f4a7c15u;
static const double HIGHEST_NOISE = 37.0; /* -log(-log(1 - 2**-53)) is 36.74 */

INLINE uint64_t mix(uint64_t h)
{
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
    return h ^ (h >> 31);
}

/* 53 bits, never 0, as a multiple of 2**-53; both halves of the sum are exact. */
INLINE double uniform(uint64_t key, int64_t id)
{
    int64_t bits = (int64_t)(mix(key + GOLDEN * ((uint64_t)id + 1)) >> 11);
    bits = bits ? bits : 1;
    return (from_whole(bits >> 27) * 0x1p27 + from_whole(bits & 0x7ffffff)) * 0x1p-53;
}

INLINE double gumbel(uint64_t key, int64_t id) { return -logarithm(-logarithm(uniform(key, id))); }

#endif
