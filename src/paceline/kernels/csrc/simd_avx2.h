#include <immintrin.h>

typedef struct {
    __m256 lo, hi;
} vf;

PL_INLINE vf v_pair(__m256 lo, __m256 hi)
{
    vf x = {lo, hi};
    return x;
}

#define PL_BOTH(name, op) \
    PL_INLINE vf name(vf a, vf b) { return v_pair(op(a.lo, b.lo), op(a.hi, b.hi)); }
PL_BOTH(v_add, _mm256_add_ps)
PL_BOTH(v_sub, _mm256_sub_ps)
PL_BOTH(v_mul, _mm256_mul_ps)
PL_BOTH(v_div, _mm256_div_ps)
PL_BOTH(v_max, _mm256_max_ps)
PL_BOTH(v_min, _mm256_min_ps)
#undef PL_BOTH

PL_INLINE vf v_load(const float *p) { return v_pair(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
PL_INLINE void v_store(float *p, vf x)
{
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}
PL_INLINE vf v_set1(float x) { return v_pair(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
PL_INLINE vf v_fma(vf a, vf b, vf c)
{
    return v_pair(_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi));
}
PL_INLINE vf v_abs(vf a)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return v_pair(_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi));
}
PL_INLINE vf v_rint(vf a)
{
    return v_pair(_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                  _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

PL_INLINE __m256 v_power2(__m256 n)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
PL_INLINE vf v_scale2(vf a, vf n)
{
    return v_pair(_mm256_mul_ps(a.lo, v_power2(n.lo)), _mm256_mul_ps(a.hi, v_power2(n.hi)));
}
PL_INLINE vf v_zero_below(vf a, vf x, vf bound)
{
    return v_pair(_mm256_and_ps(a.lo, _mm256_cmp_ps(x.lo, bound.lo, _CMP_NLT_UQ)),
                  _mm256_and_ps(a.hi, _mm256_cmp_ps(x.hi, bound.hi, _CMP_NLT_UQ)));
}
PL_INLINE vf v_choose_below(vf x, vf bound, vf small, vf big)
{
    return v_pair(_mm256_blendv_ps(big.lo, small.lo, _mm256_cmp_ps(x.lo, bound.lo, _CMP_LT_OQ)),
                  _mm256_blendv_ps(big.hi, small.hi, _mm256_cmp_ps(x.hi, bound.hi, _CMP_LT_OQ)));
}
PL_INLINE vf v_sign(vf a, vf s)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return v_pair(_mm256_or_ps(a.lo, _mm256_and_ps(s.lo, sign)), _mm256_or_ps(a.hi, _mm256_and_ps(s.hi, sign)));
}

PL_INLINE __m256 v_widen_bf16(const uint16_t *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
PL_INLINE vf v_load_bf16(const uint16_t *p) { return v_pair(v_widen_bf16(p), v_widen_bf16(p + 8)); }
PL_INLINE vf v_load_s8(const int8_t *p)
{
    return v_pair(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))),
                  _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))));
}
PL_INLINE void v_store_s16(int16_t *p, vf x)
{
    __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi));
    _mm256_storeu_si256((__m256i *)p, _mm256_permute4x64_epi64(w, 0xd8));
}
PL_INLINE void v_store_s8(int8_t *p, vf x)
{
    int16_t wide[PL_LANES];
    v_store_s16(wide, x);
    for (int i = 0; i < PL_LANES; i++)
        p[i] = (int8_t)wide[i];
}

PL_INLINE vf v_butterfly8(vf a) { return v_pair(_mm256_add_ps(a.lo, a.hi), _mm256_sub_ps(a.lo, a.hi)); }
PL_INLINE __m256 v_swap4(__m256 a) { return _mm256_permute2f128_ps(a, a, 1); }
PL_INLINE __m256 v_swap2(__m256 a) { return _mm256_permute_ps(a, 0x4e); }
PL_INLINE __m256 v_swap1(__m256 a) { return _mm256_permute_ps(a, 0xb1); }
#define PL_FLY(name, swap, blend) \
    PL_INLINE __m256 name##_half(__m256 a) \
    { \
        __m256 b = swap(a); \
        return _mm256_blend_ps(_mm256_add_ps(a, b), _mm256_sub_ps(b, a), blend); \
    } \
    PL_INLINE vf name(vf a) { return v_pair(name##_half(a.lo), name##_half(a.hi)); }
PL_FLY(v_butterfly4, v_swap4, 0xf0)
PL_FLY(v_butterfly2, v_swap2, 0xcc)
PL_FLY(v_butterfly1, v_swap1, 0xaa)
#undef PL_FLY

PL_INLINE float v_hsum(vf x)
{
    __m256 a = _mm256_add_ps(x.lo, x.hi);
    a = _mm256_add_ps(a, v_swap4(a));
    a = _mm256_add_ps(a, v_swap2(a));
    a = _mm256_add_ps(a, v_swap1(a));
    return _mm256_cvtss_f32(a);
}
PL_INLINE float v_hmax(vf x)
{
    __m256 a = _mm256_max_ps(x.lo, x.hi);
    a = _mm256_max_ps(a, v_swap4(a));
    a = _mm256_max_ps(a, v_swap2(a));
    a = _mm256_max_ps(a, v_swap1(a));
    return _mm256_cvtss_f32(a);
}
