/* Quantised rows times a matrix of signed bytes with a scale for each output feature.
 *
 * Panels are packed as in linear.h, four bytes to a word. The bytes of a row are shifted by
 * ZERO_BYTE, so the sums begin at what takes the shift out again.
 *
 * Invariants: the sums are exact, so a result has the same bits whatever the other rows, the number
 * of threads and the instruction set.
 */

INLINE void F(write_scaled_row)(
    const linear_int8_arguments *a, int64_t row, int64_t first, int64_t count, const float *sums,
    const int is_bf16) {
    char *to = (char *)a->out + (row * a->out_row + first) * (is_bf16 ? 2 : 4);
    const float *scales = a->scales + first;
    float row_scale = a->x.scales[row];
    for (int64_t i = 0; i < count; i += LANES) {
        vf x = F(to_float)((vi)F(load)(sums + i)) * (F(load)(scales + i) * row_scale);
        if (count - i >= LANES)
            F(store_rounded)(to, i, x, is_bf16);
        else
            F(store_some_rounded)(to, i, (int)(count - i), x, is_bf16);
    }
}

static void F(run_int8_panel)(
    const linear_int8_arguments *a, int64_t panel, int64_t row, int64_t end_row) {
    float sums[MAX_ROWS * PANEL];
    int64_t steps = a->in_features / 4, first = panel * PANEL;
    int64_t count = a->out_features - first < PANEL ? a->out_features - first : PANEL;
    F(operands) o = {0, steps, (const float *)a->packed + panel * steps * PANEL, PANEL,
                     sums, PANEL, 0, (const float *)a->start + first, steps};
    int64_t groups = (end_row - row + MAX_ROWS - 1) / MAX_ROWS;
    for (; row < end_row; groups--) {
        int rows = (int)((end_row - row + groups - 1) / groups);
        o.a = (const float *)(const void *)(a->x.values + row * a->in_features);
        F(multiply)(&o, rows, PANEL, BYTES);
        for (int r = 0; r < rows; r++, row++) {
            if (a->is_bf16)
                F(write_scaled_row)(a, row, first, count, sums + r * PANEL, 1);
            else
                F(write_scaled_row)(a, row, first, count, sums + r * PANEL, 0);
        }
    }
}

ONE_COPY void F(linear_int8_share)(const linear_int8_arguments *a) {
    int64_t panels = (a->out_features + PANEL - 1) / PANEL, pieces = F(row_pieces)(a->num_rows);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < panels * pieces; i++) {
        int64_t piece = i % pieces;
        F(run_int8_panel)(a, i / pieces, a->num_rows * piece / pieces,
                          a->num_rows * (piece + 1) / pieces);
    }
}

/* in_features fill whole blocks here. */
EXPORT int F(linear_int8)(const linear_int8_arguments *a) {
    if (a->in_features % ROTATED || a->in_features > MAX_INT8_FEATURES) return NOT_SUPPORTED;
#pragma omp parallel num_threads((int)a->num_threads)
    F(linear_int8_share)(a);
    return DONE;
}
