/* Which instructions the processor has and the system lets us use. The processor itself is asked:
 * __builtin_cpu_supports answers no to everything in what zig links. */
#ifndef PL_CPU_H
#define PL_CPU_H

#if defined(__x86_64__)
#include <cpuid.h>
#include <stdint.h>

enum { PL_CPU_BASE, PL_CPU_AVX2, PL_CPU_AVX512, PL_CPU_VNNI };

static inline uint32_t pl_saved_registers(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

/* AVX2 comes with FMA here, AVX512 is F, DQ, BW and VL. */
static inline int pl_cpu(void)
{
    uint32_t a, b, c, d, wide = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 12 & 1) || !(c >> 27 & 1) || (pl_saved_registers() & 0x6) != 0x6)
        return PL_CPU_BASE;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b >> 5 & 1))
        return PL_CPU_BASE;
    if ((b & wide) != wide || (pl_saved_registers() & 0xe6) != 0xe6)
        return PL_CPU_AVX2;
    return c >> 11 & 1 ? PL_CPU_VNNI : PL_CPU_AVX512;
}
#endif

#endif
