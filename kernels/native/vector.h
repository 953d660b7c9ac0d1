/* Vectors of LANES floats, by the compiler's own vector types; included once per instruction set.
 *
 * Expects: F(name), which adds the instruction set's suffix; ISA_LEVEL: 0 what every processor of
 * the kind has, 1 AVX2 and FMA, 2 AVX-512, 3 also its byte products (VNNI), 4 also those of
 * bfloat16 and permutes of bytes (VBMI).
 *
 * Invariants: maximum(a, b) gives b where a is NaN; nothing here rounds other than IEEE says.
 */

#if ISA_LEVEL >= 2
#define LANES 16
#define MAX_ROWS 6
#define MAX_VECTORS 4
#elif ISA_LEVEL == 1
#define LANES 8
#define MAX_ROWS 6
#define MAX_VECTORS 2
#else
#define LANES 4
#define MAX_ROWS 6
#define MAX_VECTORS 2
#endif
/* MAX_ROWS * MAX_VECTORS sums, a vector of each operand and a temporary fill the registers. */

#define vf F(vf)
#define vi F(vi)
#define vu F(vu)
#define vh F(vh)
#define vb F(vb)

typedef float vf __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * LANES), may_alias));
typedef uint16_t vh __attribute__((vector_size(2 * LANES), may_alias));
typedef uint8_t vb __attribute__((vector_size(LANES), may_alias));

INLINE vf F(splat)(float x) { return x - (vf){0}; }

INLINE vi F(splat_int)(int32_t x) { return x - (vi){0}; }

/* The 32 bits at p in every lane, whatever they mean. */
INLINE vf F(splat_word)(const float *p) {
    uint32_t bits;
    memcpy(&bits, p, sizeof bits);
    return (vf)(bits + (vu){0});
}

INLINE vf F(load)(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE void F(store)(float *p, vf x) { memcpy(p, &x, sizeof x); }

INLINE vf F(select)(vi mask, vf yes, vf no) {
    return (vf)(((vi)yes & mask) | ((vi)no & ~mask));
}

INLINE vf F(maximum)(vf a, vf b) {
#if ISA_LEVEL >= 2
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif ISA_LEVEL == 1
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return F(select)(a > b, a, b);
#endif
}

/* 0, 1, 2 ... LANES - 1 */
INLINE vi F(iota)(void) {
    vi x;
    for (int i = 0; i < LANES; i++) x[i] = i;
    return x;
}

INLINE vf F(to_float)(vi x) { return __builtin_convertvector(x, vf); }

/* To the nearest whole number, ties to even; |x| below 2^31. */
INLINE vi F(to_int)(vf x) {
#if ISA_LEVEL >= 2
    return (vi)_mm512_cvtps_epi32((__m512)x);
#elif ISA_LEVEL == 1
    return (vi)_mm256_cvtps_epi32((__m256)x);
#else
    vi whole;
    for (int i = 0; i < LANES; i++) whole[i] = (int32_t)lrintf(x[i]);
    return whole;
#endif
}

/* The lowest byte of every lane. */
INLINE vb F(to_bytes)(vi x) {
#if ISA_LEVEL >= 2
    return (vb)_mm512_cvtepi32_epi8((__m512i)x);
#endif
    return __builtin_convertvector(x, vb);
}

/* The upper half of 2 * width lanes moved down. */
INLINE vf F(fold)(vf x, const int width) {
    vi index = F(iota)();
    return __builtin_shuffle(x, (index & (width - 1)) + width);
}

/* Added up in pairs, halves onto halves. */
INLINE float F(sum)(vf x) {
#pragma GCC unroll 4
    for (int width = LANES / 2; width > 0; width /= 2) x = x + F(fold)(x, width);
    return x[0];
}

INLINE float F(largest)(vf x) {
#pragma GCC unroll 4
    for (int width = LANES / 2; width > 0; width /= 2) x = F(maximum)(x, F(fold)(x, width));
    return x[0];
}

INLINE vf F(from_bf16)(vh x) {
#if ISA_LEVEL >= 2
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16);
#endif
    return (vf)(__builtin_convertvector(x, vu) << 16);
}

/* Round to the nearest, ties to even; NaN stays NaN. */
INLINE vh F(to_bf16)(vf x) {
    vu bits = (vu)x;
    vu rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    vu is_nan = (vu)(x != x);
    rounded = (rounded & ~is_nan) | (0x7FC0u & is_nan);
#if ISA_LEVEL >= 2
    return (vh)_mm512_cvtepi32_epi16((__m512i)rounded);
#endif
    return __builtin_convertvector(rounded, vh);
}

/* LANES elements from element i of a row of floats or of bfloat16. */
INLINE vf F(load_as_float)(const void *row, int64_t i, const int is_bf16) {
    if (!is_bf16) return F(load)((const float *)row + i);
    vh x;
    memcpy(&x, (const uint16_t *)row + i, sizeof x);
    return F(from_bf16)(x);
}

INLINE void F(store_rounded)(void *row, int64_t i, vf x, const int is_bf16) {
    if (!is_bf16) {
        F(store)((float *)row + i, x);
        return;
    }
    vh rounded = F(to_bf16)(x);
    memcpy((uint16_t *)row + i, &rounded, sizeof rounded);
}

/* LANES signed bytes. */
INLINE vf F(load_bytes)(const int8_t *p) {
    vb x;
    memcpy(&x, p, sizeof x);
#if ISA_LEVEL >= 2
    return F(to_float)((vi)_mm512_cvtepi8_epi32((__m128i)x));
#endif
    return F(to_float)(((vi)__builtin_convertvector(x, vu) << 24) >> 24);
}

/* Bytes of e4m3 as floats; the two that stand for no number are not told apart, as a head with one
 * has a scale that is none. Sign 1 bit, exponent 4 (bias 7), mantissa 3. */
INLINE vf F(from_e4m3)(vi x) {
    vi magnitude = x & 0x7F;
    vf normal = (vf)((magnitude << 20) + (120 << 23));
    vf small = F(to_float)(magnitude) * 0x1p-9f;
    vf value = F(select)(magnitude < 8, small, normal);
    return (vf)((vi)value | ((x & 0x80) << 24));
}

/* Floats of at most 448 as bytes of e4m3, to the nearest, ties to even. */
INLINE vi F(to_e4m3)(vf x) {
    vi bits = (vi)x & 0x7FFFFFFF;
    vi normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3);
    vi small = F(to_int)((vf)bits * 512.0f);
    vi magnitude = (vi)F(select)(bits < (121 << 23), (vf)small, (vf)normal);
    return magnitude | (((vi)x >> 24) & 0x80);
}

/* LANES bytes of e4m3. */
INLINE vf F(load_e4m3)(const int8_t *p) {
    vb x;
    memcpy(&x, p, sizeof x);
    return F(from_e4m3)((vi)__builtin_convertvector(x, vu));
}

/* The same for the last `count` < LANES elements of a row; lanes past them read as 0. */
INLINE vf F(load_some_as_float)(const void *row, int64_t i, int count, const int is_bf16) {
    uint32_t padded[LANES] = {0};
    int width = is_bf16 ? 2 : 4;
    memcpy(padded, (const char *)row + i * width, (size_t)(count * width));
    return F(load_as_float)(padded, 0, is_bf16);
}

INLINE void F(store_some_rounded)(void *row, int64_t i, int count, vf x, const int is_bf16) {
    uint32_t padded[LANES];
    int width = is_bf16 ? 2 : 4;
    F(store_rounded)(padded, 0, x, is_bf16);
    memcpy((char *)row + i * width, padded, (size_t)(count * width));
}

/* exp(x) for x up to 88, to about 1e-7; exp(88) above; below -87.3, where floats turn subnormal,
 * exactly 0; NaN stays NaN.
 * Source of the polynomial: Cephes expf (S. L. Moshier). */
INLINE vf F(exponential)(vf x) {
    const float bias = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number */
    vf capped = -F(maximum)(F(splat)(-88.0f), -x);
    vf shifted = capped * 1.44269504088896341f + bias;
    vf whole = shifted - bias;
    vf rest = capped - whole * 0.693359375f;
    rest = rest - whole * -2.12194440e-4f;
    vf series = F(splat)(1.9875691500e-4f);
    series = series * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    series = series * rest * rest + rest + 1.0f;
    vf power = (vf)(((vi)shifted << 23) + 0x3F800000);
#if ISA_LEVEL >= 2
    __mmask16 tiny = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.3f), _CMP_LT_OQ);
    return (vf)_mm512_mask_blend_ps(tiny, (__m512)(series * power), _mm512_setzero_ps());
#else
    return F(select)(x < -87.3f, (vf){0}, series * power);
#endif
}

INLINE float F(exponential_of_one)(float x) { return F(exponential)(F(splat)(x))[0]; }

/* Transposes LANES vectors in place: row i, lane j becomes row j, lane i. */
INLINE void F(transpose)(vf *rows) {
    vi low, high;
    for (int i = 0; i < LANES; i++) {
        low[i] = (i >> 1) + (i & 1) * LANES;
        high[i] = (i >> 1) + (i & 1) * LANES + LANES / 2;
    }
    /* Interleaving the two halves of the rows turns the index (row, lane) by one bit. */
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
        vf next[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            next[2 * i] = __builtin_shuffle(rows[i], rows[i + LANES / 2], low);
            next[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + LANES / 2], high);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) rows[i] = next[i];
    }
}

/* sums + a * b in int32: four unsigned bytes of a by four signed ones of b in every 32 bits. Exact:
 * nothing is saturated on the way. */
INLINE vi F(multiply_add_bytes)(vi sums, vu a, vi b) {
#if ISA_LEVEL >= 3
    return (vi)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif ISA_LEVEL >= 1
    /* As 16-bit numbers: the even bytes, then the odd ones. */
    vu a_even = a & 0x00FF00FFu, a_odd = (a >> 8) & 0x00FF00FFu;
#if ISA_LEVEL == 2
    __m512i b_even = _mm512_srai_epi16(_mm512_slli_epi16((__m512i)b, 8), 8);
    __m512i b_odd = _mm512_srai_epi16((__m512i)b, 8);
    vi even = (vi)_mm512_madd_epi16((__m512i)a_even, b_even);
    vi odd = (vi)_mm512_madd_epi16((__m512i)a_odd, b_odd);
#else
    __m256i b_even = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)b, 8), 8);
    __m256i b_odd = _mm256_srai_epi16((__m256i)b, 8);
    vi even = (vi)_mm256_madd_epi16((__m256i)a_even, b_even);
    vi odd = (vi)_mm256_madd_epi16((__m256i)a_odd, b_odd);
#endif
    return sums + even + odd;
#else
    for (int i = 0; i < 32; i += 8) {
        vi byte = (vi)((vu)b << (24 - i)) >> 24;
        sums = sums + (vi)((a >> i) & 0xFFu) * byte;
    }
    return sums;
#endif
}

/* sums + a * b, where every 32 bits hold what `kind` says: see product.h. */
INLINE vf F(multiply_add)(vf sums, vf a, vf b, const int kind) {
    if (kind == BYTES) return (vf)F(multiply_add_bytes)((vi)sums, (vu)a, (vi)b);
#if ISA_LEVEL >= 4
    if (kind == PAIRS) return (vf)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#endif
    return a * b + sums;
}
