/* The inner product of everything: a few rows of A by a packed B, sums kept in registers.
 *
 * A is (rows, steps) of 32-bit words, B is (steps, columns) of the same. What a word holds, along
 * the summed axis, is its kind: a float; two bfloat16; or four bytes, without sign in A, with a sign
 * in B. C is (rows, columns) of float, or, for bytes, of int32.
 *
 * Invariants: an element of C is summed over the steps in ascending order, whatever the number of
 * rows or columns computed beside it, so it has the same bits in any company.
 */

typedef struct F(operands) {
    const float *a;
    int64_t a_stride;
    const float *b;
    int64_t b_stride;
    float *c;
    int64_t c_stride;
    const float *factors; /* C starts as C * factors[row] where they are given, */
    const float *start;   /* else as these (columns) words where they are given, else as 0 */
    int64_t steps;
} F(operands);

INLINE void F(block)(
    const F(operands) *o, int64_t column, const int rows, const int vectors, const int kind) {
    vf sums[MAX_ROWS][MAX_VECTORS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++) {
            sums[r][n] = (vf){0};
            if (o->factors) {
                vf held = F(load)(o->c + r * o->c_stride + column + n * LANES);
                sums[r][n] = held * o->factors[r];
            } else if (o->start) {
                sums[r][n] = F(load)(o->start + column + n * LANES);
            }
        }
    const float *b = o->b + column;
    for (int64_t step = 0; step < o->steps; step++, b += o->b_stride) {
        vf loaded[MAX_VECTORS];
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++) loaded[n] = F(load)(b + n * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            vf a = F(splat_word)(o->a + r * o->a_stride + step);
#pragma GCC unroll 4
            for (int n = 0; n < vectors; n++)
                sums[r][n] = F(multiply_add)(sums[r][n], a, loaded[n], kind);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++)
            F(store)(o->c + r * o->c_stride + column + n * LANES, sums[r][n]);
}

INLINE void F(columns_of)(
    const F(operands) *o, int64_t columns, const int rows, const int kind) {
    int64_t column = 0;
    for (; column + MAX_VECTORS * LANES <= columns; column += MAX_VECTORS * LANES)
        F(block)(o, column, rows, MAX_VECTORS, kind);
    for (; column < columns; column += LANES) F(block)(o, column, rows, 1, kind);
}

/* rows: 1 to MAX_ROWS; columns: a multiple of LANES */
INLINE void F(multiply_typed)(
    const F(operands) *o, int rows, int64_t columns, const int kind) {
    switch (rows) {
        case 1: F(columns_of)(o, columns, 1, kind); break;
        case 2: F(columns_of)(o, columns, 2, kind); break;
        case 3: F(columns_of)(o, columns, 3, kind); break;
        case 4: F(columns_of)(o, columns, 4, kind); break;
        case 5: F(columns_of)(o, columns, 5, kind); break;
        default: F(columns_of)(o, columns, 6, kind); break;
    }
}

/* kind: FLOATS, PAIRS or BYTES */
static void F(multiply)(const F(operands) *o, int rows, int64_t columns, int kind) {
    if (kind == PAIRS)
        F(multiply_typed)(o, rows, columns, PAIRS);
    else if (kind == BYTES)
        F(multiply_typed)(o, rows, columns, BYTES);
    else
        F(multiply_typed)(o, rows, columns, FLOATS);
}
