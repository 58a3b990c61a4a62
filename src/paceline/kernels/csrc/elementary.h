/* Logarithm and exponential of elementary.py: the same IEEE operations in the same order, so the same bits. Written
 * out term by term and without conversions from 64-bit integers, so that every path makes vectors of them. */
#ifndef PL_ELEMENTARY_H
#define PL_ELEMENTARY_H

#include "compile.h"

#include <stdint.h>
#include <string.h>

/* A whole number of less than 2**51 in size as a double, exactly, and back. */
INLINE double from_whole(int64_t i)
{
    double x;
    i += 0x4338000000000000; /* the bits of 1.5 * 2**52, whose last bit is worth 1 */
    memcpy(&x, &i, 8);
    return x - 0x1.8p52;
}

INLINE double logarithm(double x)
{
    int64_t bits, e;
    double m;
    memcpy(&bits, &x, 8);
    e = (bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffff) | ((int64_t)1023 << 52);
    memcpy(&m, &bits, 8);
    const int64_t large = m > 0x1.6a09e667f3bcdp+0;
    m = large ? m * 0.5 : m;
    double s = (m - 1.0) / (m + 1.0), t = s * s, p = 1.0 / 21, scale = from_whole(e + large);
    p = p * t + 1.0 / 19;
    p = p * t + 1.0 / 17;
    p = p * t + 1.0 / 15;
    p = p * t + 1.0 / 13;
    p = p * t + 1.0 / 11;
    p = p * t + 1.0 / 9;
    p = p * t + 1.0 / 7;
    p = p * t + 1.0 / 5;
    p = p * t + 1.0 / 3;
    p = p * t + 1.0;
    return scale * 0x1.62e42fee00000p-1 + (scale * 0x1.a39ef35793c76p-33 + (s + s) * p);
}

/* exp(x) of x <= 0; below -700 exp(-700) */
INLINE double exponential(double x)
{
    x = x < -700.0 ? -700.0 : x;
    double moved = x * 0x1.71547652b82fep+0 + 0x1.8p52, whole = moved - 0x1.8p52;
    double r = (x - whole * 0x1.62e42fee00000p-1) - whole * 0x1.a39ef35793c76p-33, p = 1.0 / 6227020800.0, power;
    int64_t bits;
    memcpy(&bits, &moved, 8);
    bits = (int64_t)((uint64_t)(bits + 1023) << 52);
    memcpy(&power, &bits, 8);
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    return p * power;
}

#endif
