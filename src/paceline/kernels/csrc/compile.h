/* How the loops of sample.c are compiled: plain C that compilers turn into vectors, once for each path. */
#ifndef PL_COMPILE_H
#define PL_COMPILE_H

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math") /* nobody reads the exception flags; a select need not be a branch */
#endif

#if defined(__clang__)
#define AVX512 "avx512f,avx512dq,avx512bw,avx512vl"
#else
#define AVX512 "avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512"
#endif

#define INLINE static inline __attribute__((always_inline))

#endif
