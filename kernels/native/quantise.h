/* Rows to unsigned bytes with a scale each, after a rotation that spreads what sticks out.
 *
 * A row is cut into blocks of ROTATED features, each is multiplied by the Hadamard matrix, and the
 * result is (byte - ZERO_BYTE) * scale. The weights are rotated alike when they are packed, so the
 * product stays what it was; but one large feature no longer costs all the others their precision.
 *
 * Invariants: the reference in kernels/quantise.py gives the same bytes and the same scale; a row
 * that is not finite has the scale NaN, so that nothing computed from it looks sound.
 * Source: QuaRot, Ashkboos et al. 2024, arXiv 2404.00456.
 */

enum { F(vectors_of_block) = ROTATED / LANES };

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

INLINE void F(load_rotated)(vf *block, const void *row, int64_t i, const int is_bf16) {
#pragma GCC unroll 16
    for (int n = 0; n < F(vectors_of_block); n++)
        block[n] = F(load_as_float)(row, i + n * LANES, is_bf16);
    F(rotate_block)(block);
}

/* row and to: `size` elements, a multiple of ROTATED */
INLINE void F(quantise_row)(
    uint8_t *to, float *scale, const void *row, int64_t size, const int is_bf16) {
    vf peaks = {0}, block[F(vectors_of_block)];
    vi odd_ones = {0};
    for (int64_t i = 0; i < size; i += ROTATED) {
        F(load_rotated)(block, row, i, is_bf16);
        for (int n = 0; n < F(vectors_of_block); n++) {
            odd_ones |= ((vi)block[n] & 0x7F800000) == 0x7F800000;
            peaks = F(maximum)((vf)((vi)block[n] & 0x7FFFFFFF), peaks);
        }
    }
    int32_t any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= odd_ones[lane];
    float peak = F(largest)(peaks);
    int empty = any || peak < SMALLEST_PEAK;
    *scale = any ? NAN : empty ? 0.0f : peak / 127.0f;
    if (empty) {
        memset(to, ZERO_BYTE, (size_t)size);
        return;
    }
    float factor = 127.0f / peak;
    for (int64_t i = 0; i < size; i += ROTATED) {
        F(load_rotated)(block, row, i, is_bf16);
        for (int n = 0; n < F(vectors_of_block); n++) {
            vb bytes = F(to_bytes)(F(to_int)(block[n] * factor) + ZERO_BYTE);
            memcpy(to + i + n * LANES, &bytes, LANES);
        }
    }
}

/* Row `row` of a matrix whose rows lie one after the other. */
INLINE void F(quantise_nth)(
    const quantised_rows *to, const void *rows, int64_t row, int64_t size, const int is_bf16) {
    const char *from = (const char *)rows + row * size * (is_bf16 ? 2 : 4);
    F(quantise_row)(to->values + row * size, to->scales + row, from, size, is_bf16);
}

EXPORT int F(quantise)(const quantise_arguments *a) {
    int64_t size = a->num_rows * a->size, width = a->is_bf16 ? 2 : 4;
#pragma omp parallel for schedule(static) num_threads((int)a->num_threads) if (size > MIN_PARALLEL)
    for (int64_t row = 0; row < a->num_rows; row++) {
        const char *from = (const char *)a->x + row * a->x_row * width;
        uint8_t *to = a->to.values + row * a->size;
        if (a->is_bf16)
            F(quantise_row)(to, a->to.scales + row, from, a->size, 1);
        else
            F(quantise_row)(to, a->to.scales + row, from, a->size, 0);
    }
    return DONE;
}

/* One head of one token for a cache of signed bytes: `size` bytes, then their scale. Not rotated. */
INLINE void F(quantise_head)(
    char *to, const void *head, int64_t size, const int is_bf16) {
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
    float scale = any ? NAN : empty ? 0.0f : peak / 127.0f, factor = empty ? 0.0f : 127.0f / peak;
    memcpy(to + size, &scale, sizeof scale);
    if (empty) {
        memset(to, 0, (size_t)size);
        return;
    }
    for (int64_t i = 0; i < size; i += LANES) {
        vb bytes = F(to_bytes)(F(to_int)(F(load_up_to)(head, i, size, is_bf16) * factor));
        memcpy(to + i, &bytes, size - i < LANES ? (size_t)(size - i) : LANES);
    }
}
