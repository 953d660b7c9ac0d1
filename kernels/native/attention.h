/* Attention of a batch: checks the block table, cuts the work into tasks, runs them on all threads.
 *
 * Invariant: the cut depends on the number of threads; what comes out does not.
 */

/* Checks the block ids that will be followed. */
static int F(check_blocks)(const attention_arguments *a) {
    for (int64_t seq = 0; seq < a->num_seqs; seq++) {
        int64_t seqlen_q = F(seqlen_q)(a, seq);
        if (seqlen_q == 0) continue;
        F(span) first = F(visible)(a, seq, 0), last = F(visible)(a, seq, seqlen_q - 1);
        for (int64_t i = first.first / a->block_size; i * a->block_size < last.end; i++) {
            if (i >= a->table_width) return BLOCK_OUT_OF_RANGE;
            int64_t block = a->block_table[seq * a->table_row + i];
            if (block < 0 || block >= a->num_blocks) return BLOCK_OUT_OF_RANGE;
        }
    }
    return DONE;
}

/* Cuts the batch into tasks; with a null `tasks` only counts them. Where `split` is set, blocks of
 * queries become one task per segment, with room for a partial result from `partial` on. */
static int64_t F(plan)(
    const attention_arguments *a, F(task) *tasks, int split, float *partial, int64_t *room) {
    F(shape) s = F(shape_of)(a);
    int64_t at_once = MAX_BLOCK_ROWS / s.group, count = 0;
    *room = 0;
    if (at_once < 1) at_once = 1;
    for (int64_t seq = 0; seq < a->num_seqs; seq++) {
        int64_t seqlen_q = F(seqlen_q)(a, seq);
        for (int64_t kv_head = 0; kv_head < a->num_kv_heads; kv_head++)
            for (int64_t query = 0; query < seqlen_q; query += at_once) {
                int64_t end = query + at_once < seqlen_q ? query + at_once : seqlen_q;
                F(span) first = F(visible)(a, seq, query), last = F(visible)(a, seq, end - 1);
                int64_t segment = first.first / SEGMENT;
                int64_t end_segment = (last.end + SEGMENT - 1) / SEGMENT;
                int64_t size = (end - query) * s.group * (s.padded_dim + 2);
                int alone = !split || end_segment - segment < 2;
                do {
                    int64_t next = alone ? end_segment : segment + 1;
                    if (tasks)
                        tasks[count] = (F(task)){seq, kv_head, query, end, segment, next,
                                                 alone ? 0 : partial + *room};
                    if (!alone) *room += size;
                    count++;
                    segment = next;
                } while (segment < end_segment);
            }
    }
    return count;
}

/* The tasks of a batch; they serve every layer of a step, which differ in their caches alone. */
typedef struct F(work) {
    F(task) *tasks;
    float *partial;
    int64_t count, chunk;
} F(work);

/* Segments in which nothing is visible leave their partial result as it is set here. */
static void F(empty_partials)(const attention_arguments *a, const F(task) *t) {
    int64_t rows = (t->end_query - t->first_query) * (a->num_heads / a->num_kv_heads);
    for (int64_t r = 0; r < rows; r++) {
        t->partial[r] = -INFINITY;
        t->partial[rows + r] = 0.0f;
    }
}

static void F(release)(F(work) *w) {
    free(w->tasks);
    free(w->partial);
}

/* Checks the batch and makes its tasks, which `release` frees also where this failed. */
static int F(prepare)(const attention_arguments *a, F(work) *w) {
    *w = (F(work)){0, 0, 0, 1};
    int problem = F(check_blocks)(a);
    if (problem) return problem;
    int64_t room, threads = a->num_threads;
    w->count = F(plan)(a, 0, 0, 0, &room);
    if (w->count == 0) return DONE;
    /* Few tasks leave threads idle at the end; the cut changes no result. */
    int split = threads > 1 && w->count < 8 * threads;
    if (split) w->count = F(plan)(a, 0, 1, 0, &room);
    if (room) w->partial = malloc((size_t)room * 4);
    w->tasks = malloc((size_t)w->count * sizeof *w->tasks);
    if (!w->tasks || (room && !w->partial)) return OUT_OF_MEMORY;
    F(plan)(a, w->tasks, split, w->partial, &room);
    for (int64_t i = 0; i < w->count; i++)
        if (w->tasks[i].partial) F(empty_partials)(a, w->tasks + i);
    /* A thread takes the heads of a sequence together: their keys are neighbours in memory. */
    if (w->count >= 8 * threads * a->num_kv_heads) w->chunk = a->num_kv_heads;
    return DONE;
}

/* Whether two tasks are segments of the same queries. */
INLINE int F(belong_together)(const F(task) *t, const F(task) *u) {
    return t->partial && u->partial && t->seq == u->seq && t->kv_head == u->kv_head &&
           t->first_query == u->first_query;
}

ONE_COPY void F(attention_share)(const attention_arguments *a, const F(work) *w) {
#pragma omp for schedule(dynamic, w->chunk)
    for (int64_t i = 0; i < w->count; i++)
        F(run_task)(a, w->tasks + i, i + 1 < w->count ? w->tasks + i + 1 : 0);
    if (w->partial) {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < w->count; i++) {
            const F(task) *t = w->tasks + i;
            if (!t->partial || (i > 0 && F(belong_together)(t - 1, t))) continue;
            int64_t end = i + 1;
            while (end < w->count && F(belong_together)(t, w->tasks + end)) end++;
            F(merge_tasks)(a, t, end - i);
        }
    }
    if (!a->to.values) return;
    /* A row is quantised over all heads, which are tasks of their own: once they are done. */
    int64_t size = a->num_heads * a->head_dim;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a->cu_seqlens_q[a->num_seqs]; row++) {
        if (a->is_bf16)
            F(quantise_nth)(&a->to, a->out, row, size, 1);
        else
            F(quantise_nth)(&a->to, a->out, row, size, 0);
    }
}

EXPORT int F(varlen_paged_attention)(const attention_arguments *a) {
    F(work) w;
    int problem = F(prepare)(a, &w);
    if (!problem) {
#pragma omp parallel num_threads((int)a->num_threads) if (w.count > 1)
        F(attention_share)(a, &w);
    }
    F(release)(&w);
    return problem;
}
