#include <immintrin.h>

typedef __m512 vf;

PL_INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
PL_INLINE void v_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
PL_INLINE vf v_set1(float x) { return _mm512_set1_ps(x); }
PL_INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
PL_INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
PL_INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
PL_INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
PL_INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
PL_INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
PL_INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
PL_INLINE vf v_abs(vf a) { return _mm512_abs_ps(a); }
PL_INLINE vf v_rint(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

/* a 2^n, n whole and -126 to 127 */
PL_INLINE vf v_scale2(vf a, vf n)
{
    __m512i e = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
    return _mm512_mul_ps(a, _mm512_castsi512_ps(e));
}

/* a where x >= bound, else 0 */
PL_INLINE vf v_zero_below(vf a, vf x, vf bound)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, bound, _CMP_NLT_UQ), a);
}

/* small where x < bound, else big */
PL_INLINE vf v_choose_below(vf x, vf bound, vf small, vf big)
{
    return _mm512_mask_mov_ps(big, _mm512_cmp_ps_mask(x, bound, _CMP_LT_OQ), small);
}

/* |a| with the sign of s */
PL_INLINE vf v_sign(vf a, vf s) { return _mm512_or_ps(a, _mm512_and_ps(s, _mm512_set1_ps(-0.0f))); }

PL_INLINE vf v_load_bf16(const uint16_t *p)
{
    __m256i x = _mm256_loadu_si256((const __m256i *)p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

PL_INLINE vf v_load_s8(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

PL_INLINE void v_store_s8(int8_t *p, vf x)
{
    _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}

PL_INLINE void v_store_s16(int16_t *p, vf x)
{
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x)));
}

/* Lane i: a[i] + a[i ^ step] where bit `step` of i is 0, a[i ^ step] - a[i] where it is 1. */
PL_INLINE vf v_butterfly8(vf a)
{
    vf b = _mm512_shuffle_f32x4(a, a, 0x4e);
    return _mm512_mask_sub_ps(_mm512_add_ps(a, b), 0xff00, b, a);
}
PL_INLINE vf v_butterfly4(vf a)
{
    vf b = _mm512_shuffle_f32x4(a, a, 0xb1);
    return _mm512_mask_sub_ps(_mm512_add_ps(a, b), 0xf0f0, b, a);
}
PL_INLINE vf v_butterfly2(vf a)
{
    vf b = _mm512_permute_ps(a, 0x4e);
    return _mm512_mask_sub_ps(_mm512_add_ps(a, b), 0xcccc, b, a);
}
PL_INLINE vf v_butterfly1(vf a)
{
    vf b = _mm512_permute_ps(a, 0xb1);
    return _mm512_mask_sub_ps(_mm512_add_ps(a, b), 0xaaaa, b, a);
}

PL_INLINE float v_hsum(vf a)
{
    a = _mm512_add_ps(a, _mm512_shuffle_f32x4(a, a, 0x4e));
    a = _mm512_add_ps(a, _mm512_shuffle_f32x4(a, a, 0xb1));
    a = _mm512_add_ps(a, _mm512_permute_ps(a, 0x4e));
    a = _mm512_add_ps(a, _mm512_permute_ps(a, 0xb1));
    return _mm512_cvtss_f32(a);
}

PL_INLINE float v_hmax(vf a)
{
    a = _mm512_max_ps(a, _mm512_shuffle_f32x4(a, a, 0x4e));
    a = _mm512_max_ps(a, _mm512_shuffle_f32x4(a, a, 0xb1));
    a = _mm512_max_ps(a, _mm512_permute_ps(a, 0x4e));
    a = _mm512_max_ps(a, _mm512_permute_ps(a, 0xb1));
    return _mm512_cvtss_f32(a);
}
