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

/* A row is quantised over all heads, which are tasks of their own: once they are done. */
static void F(quantise_out)(const attention_arguments *a) {
    int64_t num_rows = a->cu_seqlens_q[a->num_seqs], size = a->num_heads * a->head_dim;
#pragma omp parallel for schedule(static) num_threads((int)a->num_threads) \
    if (num_rows * size > MIN_PARALLEL)
    for (int64_t row = 0; row < num_rows; row++) {
        if (a->is_bf16)
            F(quantise_nth)(&a->to, a->out, row, size, 1);
        else
            F(quantise_nth)(&a->to, a->out, row, size, 0);
    }
}

EXPORT int F(varlen_paged_attention)(const attention_arguments *a) {
    int problem = F(check_blocks)(a);
    if (problem) return problem;
    int64_t room, threads = a->num_threads;
    int64_t count = F(plan)(a, 0, 0, 0, &room);
    if (count == 0) return DONE;
    /* Few tasks leave threads idle at the end; the cut changes no result. */
    int split = threads > 1 && count < 8 * threads;
    if (split) count = F(plan)(a, 0, 1, 0, &room);
    float *partial = room ? malloc((size_t)room * 4) : 0;
    F(task) *tasks = malloc((size_t)count * sizeof *tasks);
    if (!tasks || (room && !partial)) {
        free(tasks);
        free(partial);
        return OUT_OF_MEMORY;
    }
    F(plan)(a, tasks, split, partial, &room);
    for (int64_t i = 0; i < count; i++)
        if (tasks[i].partial) {
            /* A segment that holds nothing visible leaves this as it is. */
            int64_t queries = tasks[i].end_query - tasks[i].first_query;
            int64_t rows = queries * (a->num_heads / a->num_kv_heads);
            for (int64_t r = 0; r < rows; r++) {
                tasks[i].partial[r] = -INFINITY;
                tasks[i].partial[rows + r] = 0.0f;
            }
        }
    /* A thread takes the heads of a sequence together: their keys are neighbours in memory. */
    int64_t chunk = count >= 8 * threads * a->num_kv_heads ? a->num_kv_heads : 1;
#pragma omp parallel for schedule(dynamic, chunk) num_threads((int)threads) if (count > 1)
    for (int64_t i = 0; i < count; i++)
        F(run_task)(a, tasks + i, i + 1 < count ? tasks + i + 1 : 0);
    for (int64_t i = 0; i < count;) {
        int64_t end = i + 1;
        if (tasks[i].partial) {
            while (end < count && tasks[end].partial && tasks[end].seq == tasks[i].seq &&
                   tasks[end].kv_head == tasks[i].kv_head &&
                   tasks[end].first_query == tasks[i].first_query)
                end++;
            F(merge_tasks)(a, tasks + i, end - i);
        }
        i = end;
    }
    free(tasks);
    free(partial);
    if (a->to.values) F(quantise_out)(a);
    return DONE;
}
