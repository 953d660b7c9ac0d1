/* Rows times a weight matrix that was packed into panels of PANEL output features.
 *
 * A panel is (steps, PANEL) words, as product.h wants its B. It comes from memory once for all
 * rows: the first few rows bring it into the second-level cache, the others find it there.
 *
 * Invariant: a row's result has the same bits whatever the other rows.
 */

INLINE void F(write_row)(
    void *out, int64_t element, const float *sums, int64_t count, const int is_bf16) {
    char *to = (char *)out + element * (is_bf16 ? 2 : 4);
    for (int64_t i = 0; i < count; i += LANES) {
        vf x = F(load)(sums + i);
        if (count - i >= LANES)
            F(store_rounded)(to, i, x, is_bf16);
        else
            F(store_some_rounded)(to, i, (int)(count - i), x, is_bf16);
    }
}

/* How many pieces the rows of a panel are cut into: two where there are rows enough, so that an odd
 * number of panels does not leave a thread idle. The second piece finds the panel in the cache. */
INLINE int64_t F(row_pieces)(int64_t num_rows) { return num_rows >= 2 * MAX_ROWS ? 2 : 1; }

static void F(run_panel)(const linear_arguments *a, int64_t panel, int64_t row, int64_t end_row) {
    float sums[MAX_ROWS * PANEL];
    int pairs = (int)a->is_bf16;
    int64_t steps = a->in_features / (1 + pairs), x_row = a->x_row / (1 + pairs);
    int64_t first = panel * PANEL;
    int64_t count = a->out_features - first < PANEL ? a->out_features - first : PANEL;
    F(operands) o = {a->x, x_row, (const float *)a->packed + panel * steps * PANEL, PANEL,
                     sums, PANEL, 0, 0, steps};
    int64_t groups = (end_row - row + MAX_ROWS - 1) / MAX_ROWS;
    for (; row < end_row; groups--) {
        /* Groups of nearly one size: a small one would wait for its operands. */
        int rows = (int)((end_row - row + groups - 1) / groups);
        o.a = (const float *)a->x + row * x_row;
        F(multiply)(&o, rows, PANEL, pairs);
        for (int r = 0; r < rows; r++, row++)
            F(write_row)(a->out, row * a->out_row + first, sums + r * PANEL, count, pairs);
    }
}

/* A share of the work, for every thread of a team; the whole of it where there is none. */
ONE_COPY void F(linear_share)(const linear_arguments *a) {
    int64_t panels = (a->out_features + PANEL - 1) / PANEL, pieces = F(row_pieces)(a->num_rows);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < panels * pieces; i++) {
        int64_t piece = i % pieces;
        F(run_panel)(a, i / pieces, a->num_rows * piece / pieces,
                     a->num_rows * (piece + 1) / pieces);
    }
}

EXPORT int F(linear)(const linear_arguments *a) {
    if (a->is_bf16 && ISA_LEVEL < 4) return NOT_SUPPORTED;
#pragma omp parallel num_threads((int)a->num_threads)
    F(linear_share)(a);
    return DONE;
}
