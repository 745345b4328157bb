/* Vectors of one instruction set, for compute.h: 16 floats with AVX-512, 8 with AVX2. */
#include <immintrin.h>

#ifdef WITH_AVX512
typedef __m512 Floats;
typedef __m512i Ints;
enum { W = 16, ROWS = 12 };
#define vload(p) _mm512_loadu_ps(p)
#define vstore(p, v) _mm512_storeu_ps(p, v)
#define vall(x) _mm512_set1_ps(x)
#define vzero() _mm512_setzero_ps()
#define vadd(a, b) _mm512_add_ps(a, b)
#define vsub(a, b) _mm512_sub_ps(a, b)
#define vmul(a, b) _mm512_mul_ps(a, b)
#define vdiv(a, b) _mm512_div_ps(a, b)
#define vfma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define vmax(a, b) _mm512_max_ps(a, b) /* b where either is not a number */
#define vmin(a, b) _mm512_min_ps(a, b)
#define vround(a) _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define vabs(a) _mm512_abs_ps(a)
#define vsum(a) _mm512_reduce_add_ps(a)
#define vmost(a) _mm512_reduce_max_ps(a)
#define vto_int(a) _mm512_cvtps_epi32(a)
#define vto_float(a) _mm512_cvtepi32_ps(a)
#define vfrom_words(p) vto_float(_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)(p))))
#define vpow2(n) \
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23))
#define iload(p) _mm512_loadu_si512(p)
#define iall(x) _mm512_set1_epi32(x)
#define izero() _mm512_setzero_si512()
#define isub(a, b) _mm512_sub_epi32(a, b)
#define imul(a, b) _mm512_mullo_epi32(a, b)
#define idot(sum, unsigned_bytes, signed_bytes) _mm512_dpbusd_epi32(sum, unsigned_bytes, signed_bytes)
static inline Floats vload_part(const float *p, size_t n) {
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
}
static inline void vstore_part(float *p, Floats v, size_t n) {
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), v);
}
/* The first n numbers of v, then those of rest. */
static inline Floats vfirst(Floats v, size_t n, Floats rest) {
    return _mm512_mask_mov_ps(rest, (__mmask16)((1u << n) - 1), v);
}
/* Which of the first n numbers are not less than x: x or more, or no number. */
static inline unsigned reaching(Floats v, float x, size_t n) {
    return _mm512_mask_cmp_ps_mask((__mmask16)((1u << n) - 1), v, vall(x), _CMP_NLT_UQ);
}
static inline unsigned not_numbers(Floats v, size_t n) {
    return _mm512_mask_cmp_ps_mask((__mmask16)((1u << n) - 1), v, v, _CMP_UNORD_Q);
}
/* The sums of four vectors. */
static inline __m128 vsum4(Floats a, Floats b, Floats c, Floats d) {
    Floats ab = vadd(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); /* in each quarter a0 b0 a1 b1 */
    Floats cd = vadd(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    Floats all = vadd(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee)); /* a b c d */
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
static inline void store_bytes(uint8_t *p, Ints v) {
    _mm_storeu_si128((__m128i *)p, _mm512_cvtusepi32_epi8(_mm512_max_epi32(v, izero())));
}
#else
typedef __m256 Floats;
typedef __m256i Ints;
enum { W = 8, ROWS = 6 };
#define vload(p) _mm256_loadu_ps(p)
#define vstore(p, v) _mm256_storeu_ps(p, v)
#define vall(x) _mm256_set1_ps(x)
#define vzero() _mm256_setzero_ps()
#define vadd(a, b) _mm256_add_ps(a, b)
#define vsub(a, b) _mm256_sub_ps(a, b)
#define vmul(a, b) _mm256_mul_ps(a, b)
#define vdiv(a, b) _mm256_div_ps(a, b)
#define vfma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define vmax(a, b) _mm256_max_ps(a, b)
#define vmin(a, b) _mm256_min_ps(a, b)
#define vround(a) _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define vabs(a) _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a)
#define vto_int(a) _mm256_cvtps_epi32(a)
#define vto_float(a) _mm256_cvtepi32_ps(a)
#define vfrom_words(p) vto_float(_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)(p))))
#define vpow2(n) \
    _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23))
#define iload(p) _mm256_loadu_si256((const __m256i *)(p))
#define iall(x) _mm256_set1_epi32(x)
#define izero() _mm256_setzero_si256()
#define isub(a, b) _mm256_sub_epi32(a, b)
#define imul(a, b) _mm256_mullo_epi32(a, b)
/* Two products are added in 16 bits: weights keep every pair of neighbours within 128 (export/precision/quantise.py).
 */
#define idot(sum, unsigned_bytes, signed_bytes) \
    _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(unsigned_bytes, signed_bytes), _mm256_set1_epi16(1)))
static inline __m256i first_lanes(size_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline Floats vload_part(const float *p, size_t n) { return _mm256_maskload_ps(p, first_lanes(n)); }
static inline void vstore_part(float *p, Floats v, size_t n) { _mm256_maskstore_ps(p, first_lanes(n), v); }
static inline Floats vfirst(Floats v, size_t n, Floats rest) {
    return _mm256_blendv_ps(rest, v, _mm256_castsi256_ps(first_lanes(n)));
}
static inline float vsum(Floats a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
static inline __m128 vsum4(Floats a, Floats b, Floats c, Floats d) {
    Floats ab = vadd(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    Floats cd = vadd(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    Floats all = vadd(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}
static inline float vmost(Floats a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
static inline unsigned reaching(Floats v, float x, size_t n) {
    return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(v, vall(x), _CMP_NLT_UQ)) & ((1u << n) - 1);
}
static inline unsigned not_numbers(Floats v, size_t n) {
    return (unsigned)_mm256_movemask_ps(_mm256_cmp_ps(v, v, _CMP_UNORD_Q)) & ((1u << n) - 1);
}
static inline void store_bytes(uint8_t *p, Ints v) {
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packus_epi16(words, words));
}
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* e^x to about an ulp from -87 to 88, and as there beyond; not a number stays one. */
INLINE Floats vexp(Floats x) {
    const Floats low = vall(-87.0f);
    Floats inside = vmin(vall(88.0f), vmax(low, x)); /* x where it is not a number */
    Floats n = vround(vmul(inside, vall(1.44269504f)));
    Floats r = vfma(n, vall(-0.693359375f), inside);
    r = vfma(n, vall(2.12194440e-4f), r);
    Floats p = vall(1.0f / 5040);
    p = vfma(p, r, vall(1.0f / 720));
    p = vfma(p, r, vall(1.0f / 120));
    p = vfma(p, r, vall(1.0f / 24));
    p = vfma(p, r, vall(1.0f / 6));
    p = vfma(p, r, vall(0.5f));
    p = vfma(p, r, vall(1.0f));
    p = vfma(p, r, vall(1.0f));
    return vmul(p, vpow2(n));
}

/* 2^x to about an ulp from -120 to 0, 0 below; not a number stays one. A fit of six terms (relative error 2e-09). */
INLINE Floats vpower(Floats x) {
    Floats inside = vmax(vall(-126.0f), x);
    Floats n = vround(inside), f = vsub(inside, n);
    Floats p = vall(0.000153532759f);
    p = vfma(p, f, vall(0.00133988682f));
    p = vfma(p, f, vall(0.00961843758f));
    p = vfma(p, f, vall(0.0555033249f));
    p = vfma(p, f, vall(0.240226479f));
    p = vfma(p, f, vall(0.693147203f));
    p = vfma(p, f, vall(1.0f));
    return vmul(p, vpow2(n));
}

/* x times the share of a normal distribution below x. The other share is exp(-x^2/2) times a polynomial of
   s = 1 / (1 + 0.4 t), t = |x| / sqrt(2), which a fit found (relative error 1.5e-9). */
INLINE Floats vgelu(Floats x) {
    static const float fit[] = {0.225691082f,   0.225326847f,   0.211085583f,  0.151994697f,
                                0.190090677f,   -0.0854663582f, 0.224011247f,  -0.150075765f,
                                -0.0411284934f, 0.0647795102f,  -0.0163090263f};
    Floats t = vmul(vabs(x), vall(0.70710678f));
    Floats s = vdiv(vall(1.0f), vfma(t, vall(0.4f), vall(1.0f)));
    Floats p = vall(fit[10]);
    UNROLL for (int i = 9; i >= 0; i--) p = vfma(p, s, vall(fit[i]));
    Floats rest = vmul(vmul(vall(0.5f), vexp(vsub(vzero(), vmul(t, t)))), vmul(p, s));
    /* x >= 0: x - x rest; x < 0: x rest, which is -|x| rest */
    return vsub(vmax(vzero(), x), vmul(vabs(x), rest));
}

INLINE Floats vsilu(Floats x) { return vdiv(x, vadd(vall(1.0f), vexp(vsub(vzero(), x)))); }
