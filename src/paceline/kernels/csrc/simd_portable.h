/* The vector types of gcc and clang: they become whatever the target has (SSE2, NEON, scalars). */
typedef float vf __attribute__((vector_size(64)));
typedef int32_t pl_whole __attribute__((vector_size(64)));

#define PL_EACH for (int i = 0; i < PL_LANES; i++)

PL_INLINE vf v_load(const float *p)
{
    vf r;
    memcpy(&r, p, sizeof r);
    return r;
}
PL_INLINE void v_store(float *p, vf x) { memcpy(p, &x, sizeof x); }
PL_INLINE vf v_set1(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
PL_INLINE vf v_add(vf a, vf b) { return a + b; }
PL_INLINE vf v_sub(vf a, vf b) { return a - b; }
PL_INLINE vf v_mul(vf a, vf b) { return a * b; }
PL_INLINE vf v_div(vf a, vf b) { return a / b; }

/* Where fmaf is a call into the library, two roundings are a hundred times faster, and as fixed. */
PL_INLINE vf v_fma(vf a, vf b, vf c)
{
#ifdef __FP_FAST_FMAF
    PL_EACH c[i] = fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}

PL_INLINE vf v_pick(pl_whole mask, vf yes, vf no) { return (vf)(((pl_whole)yes & mask) | ((pl_whole)no & ~mask)); }
PL_INLINE vf v_max(vf a, vf b) { return v_pick(a > b, a, b); }
PL_INLINE vf v_min(vf a, vf b) { return v_pick(a < b, a, b); }
PL_INLINE pl_whole v_sign_bit(void) { return (pl_whole)v_set1(-0.0f); }
PL_INLINE vf v_abs(vf a) { return (vf)((pl_whole)a & ~v_sign_bit()); }
PL_INLINE vf v_sign(vf a, vf s) { return (vf)((pl_whole)a | ((pl_whole)s & v_sign_bit())); }

/* Adding and taking away 1.5 2^23 rounds to nearest even; the values are below 2^22. */
PL_INLINE vf v_rint(vf a) { return (a + 12582912.0f) - 12582912.0f; }
PL_INLINE pl_whole v_to_whole(vf a) { return __builtin_convertvector(a, pl_whole); }
PL_INLINE vf v_scale2(vf a, vf n) { return a * (vf)((v_to_whole(n) + 127) << 23); }
PL_INLINE vf v_zero_below(vf a, vf x, vf bound) { return (vf)((pl_whole)a & ~(x < bound)); }
PL_INLINE vf v_choose_below(vf x, vf bound, vf small, vf big) { return v_pick(x < bound, small, big); }

PL_INLINE vf v_load_bf16(const uint16_t *p)
{
    pl_whole r;
    PL_EACH r[i] = (int32_t)((uint32_t)p[i] << 16);
    return (vf)r;
}
PL_INLINE vf v_load_s8(const int8_t *p)
{
    vf r;
    PL_EACH r[i] = (float)p[i];
    return r;
}
PL_INLINE void v_store_s8(int8_t *p, vf x)
{
    pl_whole n = v_to_whole(v_rint(x));
    PL_EACH p[i] = (int8_t)n[i];
}

#define PL_FLY(step) \
    PL_INLINE vf v_butterfly##step(vf a) \
    { \
        vf r; \
        PL_EACH r[i] = i & step ? a[i ^ step] - a[i] : a[i] + a[i ^ step]; \
        return r; \
    }
PL_FLY(8)
PL_FLY(4)
PL_FLY(2)
PL_FLY(1)
#undef PL_FLY

PL_INLINE float v_hsum(vf a)
{
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++)
            a[i] += a[i + step];
    return a[0];
}
PL_INLINE float v_hmax(vf a)
{
    for (int step = 8; step; step /= 2)
        for (int i = 0; i < step; i++)
            a[i] = a[i] > a[i + step] ? a[i] : a[i + step];
    return a[0];
}
