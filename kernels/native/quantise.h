/* Rows to unsigned bytes with a scale each, after a rotation that spreads what sticks out.
 *
 * A row is filled up with zeros to whole blocks of ROTATED features. Each block is multiplied by the
 * Hadamard matrix, then the blocks of a row are mixed with each other, by twos and threes as long
 * as their number can be divided. The result is (byte - ZERO_BYTE) * scale. The weights are rotated
 * alike when they are packed, so the product stays what it was; but one large feature no longer
 * costs all the others their precision.
 *
 * Invariants: the reference in kernels/quantise.py gives the same bytes and the same scale; a row
 * that is not finite has the scale NaN, so that nothing computed from it looks sound.
 * Source: QuaRot, Ashkboos et al. 2024, arXiv 2404.00456.
 */

enum { F(vectors_of_block) = ROTATED / LANES };

/* `size` features and the zeros that fill their last block. */
INLINE int64_t F(whole_blocks)(int64_t size) { return (size + ROTATED - 1) / ROTATED * ROTATED; }

/* LANES elements from element i, fewer at the end of the row. */
INLINE vf F(load_up_to)(const void *row, int64_t i, int64_t size, const int is_bf16) {
    if (size - i >= LANES) return F(load_as_float)(row, i, is_bf16);
    return F(load_some_as_float)(row, i, (int)(size - i), is_bf16);
}

/* The Hadamard matrix, not scaled, times a block: sums and differences of pairs, by halves. */
INLINE void F(rotate_block)(vf *x) {
#pragma GCC unroll 8
    for (int width = F(vectors_of_block) / 2; width > 0; width /= 2)
#pragma GCC unroll 16
        for (int n = 0; n < F(vectors_of_block); n++)
            if (!(n & width)) {
                vf a = x[n], b = x[n + width];
                x[n] = a + b;
                x[n + width] = a - b;
            }
    vi lane = F(iota)();
#pragma GCC unroll 4
    for (int width = LANES / 2; width > 0; width /= 2) {
        vi is_second = (lane & width) != 0;
#pragma GCC unroll 16
        for (int n = 0; n < F(vectors_of_block); n++) {
            vf other = __builtin_shuffle(x[n], lane ^ width);
            vf kept = (vf)((vi)x[n] ^ (is_second & (int32_t)0x80000000));
            x[n] = other + kept;
        }
    }
}

/* A block from element i on, with zeros past the end of the row, times the Hadamard matrix. */
INLINE void F(load_rotated)(vf *block, const void *row, int64_t i, int64_t size, const int is_bf16) {
    if (size - i >= ROTATED) {
#pragma GCC unroll 16
        for (int n = 0; n < F(vectors_of_block); n++)
            block[n] = F(load_as_float)(row, i + n * LANES, is_bf16);
    } else {
        for (int n = 0; n < F(vectors_of_block); n++, i += LANES)
            block[n] = i < size ? F(load_up_to)(row, i, size, is_bf16) : (vf){0};
    }
    F(rotate_block)(block);
}

/* x[i] and what lies `apart` floats after it, for i in a run of so many: sum and difference. */
INLINE void F(mix_two)(float *x, int64_t apart) {
    for (int64_t i = 0; i < apart; i += LANES) {
        vf a = F(load)(x + i), b = F(load)(x + i + apart);
        F(store)(x + i, a + b);
        F(store)(x + i + apart, a - b);
    }
}

/* The same for three, by 3 * (1 - 2/3 * ones): orthogonal, but for its size, and made of sums. */
INLINE void F(mix_three)(float *x, int64_t apart) {
    for (int64_t i = 0; i < apart; i += LANES) {
        vf a = F(load)(x + i), b = F(load)(x + i + apart), c = F(load)(x + i + 2 * apart);
        vf a2 = a + a, b2 = b + b, c2 = c + c;
        F(store)(x + i, (a - b2) - c2);
        F(store)(x + i + apart, (b - a2) - c2);
        F(store)(x + i + 2 * apart, (c - a2) - b2);
    }
}

/* Mixes the blocks of a row of `size` floats, a multiple of ROTATED. */
INLINE void F(mix_blocks)(float *x, int64_t size) {
    int64_t apart = ROTATED;
    for (; size % (2 * apart) == 0; apart *= 2)
        for (int64_t i = 0; i < size; i += 2 * apart) F(mix_two)(x + i, apart);
    for (; size % (3 * apart) == 0; apart *= 3)
        for (int64_t i = 0; i < size; i += 3 * apart) F(mix_three)(x + i, apart);
}

INLINE void F(rotate_blocks)(float *x, const void *row, int64_t size, const int is_bf16) {
    for (int64_t i = 0; i < size; i += ROTATED) {
        vf block[F(vectors_of_block)];
        F(load_rotated)(block, row, i, size, is_bf16);
        for (int n = 0; n < F(vectors_of_block); n++) F(store)(x + i + n * LANES, block[n]);
    }
}

/* row: `size` elements; to: as many bytes, filled up to a multiple of ROTATED. */
ONE_COPY void F(quantise_row)(
    uint8_t *to, float *scale, const void *row, int64_t size, int is_bf16) {
    float x[MAX_INT8_FEATURES];
    int64_t filled = F(whole_blocks)(size);
    if (is_bf16)
        F(rotate_blocks)(x, row, size, 1);
    else
        F(rotate_blocks)(x, row, size, 0);
    F(mix_blocks)(x, filled);
    vf peaks = {0};
    vi odd_ones = {0};
    for (int64_t i = 0; i < filled; i += LANES) {
        vi held = (vi)F(load)(x + i);
        odd_ones |= (held & 0x7F800000) == 0x7F800000;
        peaks = F(maximum)((vf)(held & 0x7FFFFFFF), peaks);
    }
    int32_t any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= odd_ones[lane];
    float peak = F(largest)(peaks);
    int empty = any || peak < SMALLEST_PEAK;
    *scale = any ? NAN : empty ? 0.0f : peak / 127.0f;
    if (empty) {
        memset(to, ZERO_BYTE, (size_t)filled);
        return;
    }
    float factor = 127.0f / peak;
    for (int64_t i = 0; i < filled; i += LANES) {
        vb bytes = F(to_bytes)(F(to_int)(F(load)(x + i) * factor) + ZERO_BYTE);
        memcpy(to + i, &bytes, LANES);
    }
}

/* Row `row` of a matrix whose rows lie one after the other. */
INLINE void F(quantise_nth)(
    const quantised_rows *to, const void *rows, int64_t row, int64_t size, const int is_bf16) {
    const char *from = (const char *)rows + row * size * (is_bf16 ? 2 : 4);
    uint8_t *values = to->values + row * F(whole_blocks)(size);
    F(quantise_row)(values, to->scales + row, from, size, is_bf16);
}

EXPORT int F(quantise)(const quantise_arguments *a) {
    if (a->size > MAX_INT8_FEATURES) return NOT_SUPPORTED;
    int64_t size = a->num_rows * a->size, width = a->is_bf16 ? 2 : 4;
#pragma omp parallel for schedule(static) num_threads((int)a->num_threads) if (size > MIN_PARALLEL)
    for (int64_t row = 0; row < a->num_rows; row++) {
        const char *from = (const char *)a->x + row * a->x_row * width;
        uint8_t *to = a->to.values + row * F(whole_blocks)(a->size);
        F(quantise_row)(to, a->to.scales + row, from, a->size, (int)a->is_bf16);
    }
    return DONE;
}

/* One head of one token for a cache of bytes (INT8S or FP8S): `size` of them, then their scale. Not
 * rotated. */
INLINE void F(quantise_head)(
    char *to, const void *head, int64_t size, const int is_bf16, int kind) {
    vf peaks = {0};
    vi odd_ones = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        vf x = F(load_up_to)(head, i, size, is_bf16);
        odd_ones |= ((vi)x & 0x7F800000) == 0x7F800000;
        peaks = F(maximum)((vf)((vi)x & 0x7FFFFFFF), peaks);
    }
    int32_t any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= odd_ones[lane];
    float peak = F(largest)(peaks);
    int empty = any || peak < SMALLEST_PEAK;
    float most = kind == FP8S ? 448.0f : 127.0f;
    float scale = any ? NAN : empty ? 0.0f : peak / most, factor = empty ? 0.0f : most / peak;
    memcpy(to + size, &scale, sizeof scale);
    if (empty) {
        memset(to, 0, (size_t)size);
        return;
    }
    for (int64_t i = 0; i < size; i += LANES) {
        vf x = F(load_up_to)(head, i, size, is_bf16) * factor;
        vb bytes = F(to_bytes)(kind == FP8S ? F(to_e4m3)(x) : F(to_int)(x));
        memcpy(to + i, &bytes, size - i < LANES ? (size_t)(size - i) : LANES);
    }
}
