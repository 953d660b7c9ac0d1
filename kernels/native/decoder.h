/* All layers of a decoder in one call and by one team of threads.
 *
 * Between two operations the threads meet at a barrier of the team, which takes a microsecond, where
 * a call from Python and a new team take ten to fifty.
 *
 * Invariant: the same operations on the same numbers as one by one, so the same bits.
 */

INLINE void F(multiply_rows)(
    const decoder_arguments *a, const matrix_arguments *m, const void *x,
    const quantised_rows *bytes, void *out) {
    if (m->start) {
        linear_int8_arguments l = {*bytes, m->panels, m->start, m->scales, out, m->out_features,
                                   a->num_tokens, m->in_features, m->out_features, a->is_bf16,
                                   a->num_threads};
        F(linear_int8_share)(&l);
    } else {
        linear_arguments l = {x, m->panels, out, m->in_features, m->out_features, a->num_tokens,
                              m->in_features, m->out_features, a->is_bf16, a->num_threads};
        F(linear_share)(&l);
    }
}

/* residual += x where x is given; normed = the norm of it. */
INLINE void F(normalise)(const decoder_arguments *a, const void *x, const void *weight) {
    rms_norm_arguments n = {x ? x : a->residual, x ? a->residual : 0, weight, a->residual,
                            a->normed, a->normed_bytes, a->hidden_size, a->num_tokens,
                            a->hidden_size, a->is_bf16, a->num_threads, a->epsilon};
    F(rms_norm_share)(&n);
}

INLINE rope_write_kv_arguments F(rope_of)(const decoder_arguments *a, const layer_arguments *l) {
    int64_t qkv_row = (a->num_heads + 2 * a->num_kv_heads) * a->head_dim;
    return (rope_write_kv_arguments){
        a->qkv, a->cos_sin, l->k, l->v, a->slots, qkv_row, a->rotary_dim, a->k_block, a->k_slot,
        a->k_head, a->v_block, a->v_slot, a->v_head, a->num_tokens, a->num_heads, a->num_kv_heads,
        a->head_dim, a->rotary_dim, a->num_blocks, a->block_size, a->is_bf16, a->kv_bytes,
        a->num_threads};
}

INLINE attention_arguments F(attention_of)(
    const decoder_arguments *a, const layer_arguments *l) {
    int64_t heads = a->num_heads * a->head_dim;
    int64_t qkv_row = heads + 2 * a->num_kv_heads * a->head_dim;
    return (attention_arguments){
        .q = a->qkv, .k = l->k, .v = l->v, .out = a->mixed, .to = a->mixed_bytes,
        .cu_seqlens_q = a->cu_seqlens_q, .seqlens_k = a->seqlens_k,
        .block_table = a->block_table, .q_row = qkv_row, .q_head = a->head_dim,
        .k_block = a->k_block, .k_slot = a->k_slot, .k_head = a->k_head, .v_block = a->v_block,
        .v_slot = a->v_slot, .v_head = a->v_head, .out_row = heads, .out_head = a->head_dim,
        .table_row = a->table_row, .table_width = a->table_width, .num_seqs = a->num_seqs,
        .num_heads = a->num_heads, .num_kv_heads = a->num_kv_heads, .head_dim = a->head_dim,
        .num_blocks = a->num_blocks, .block_size = a->block_size, .causal = 1,
        .is_bf16 = a->is_bf16, .kv_bytes = a->kv_bytes, .num_threads = a->num_threads, .scale = a->scale};
}

static void F(decoder_share)(const decoder_arguments *a, const F(work) *w) {
    F(normalise)(a, 0, a->layers[0].input_norm);
    for (int64_t i = 0; i < a->num_layers; i++) {
        const layer_arguments *l = a->layers + i;
        const void *next_norm = i + 1 < a->num_layers ? l[1].input_norm : a->final_norm;
        rope_write_kv_arguments rope = F(rope_of)(a, l);
        attention_arguments attention = F(attention_of)(a, l);
        silu_mul_arguments silu = {a->gate_up, a->activated, a->activated_bytes,
                                   2 * a->intermediate_size, a->num_tokens, a->intermediate_size,
                                   a->is_bf16, a->num_threads};
        F(multiply_rows)(a, &l->qkv, a->normed, &a->normed_bytes, a->qkv);
        F(rope_write_kv_share)(&rope);
        F(attention_share)(&attention, w);
        F(multiply_rows)(a, &l->attention_output, a->mixed, &a->mixed_bytes, a->moved);
        F(normalise)(a, a->moved, l->feed_forward_norm);
        F(multiply_rows)(a, &l->gate_up, a->normed, &a->normed_bytes, a->gate_up);
        F(silu_mul_share)(&silu);
        F(multiply_rows)(a, &l->down, a->activated, &a->activated_bytes, a->moved);
        F(normalise)(a, a->moved, next_norm);
    }
}

EXPORT int F(decoder)(const decoder_arguments *a) {
    if (a->is_bf16 && ISA_LEVEL < 4 && !a->normed_bytes.values) return NOT_SUPPORTED;
    rope_write_kv_arguments rope = F(rope_of)(a, a->layers);
    if (!F(slots_are_in_pool)(&rope)) return BLOCK_OUT_OF_RANGE;
    attention_arguments attention = F(attention_of)(a, a->layers);
    F(work) w;
    int problem = F(prepare)(&attention, &w);
    if (!problem) {
#pragma omp parallel num_threads((int)a->num_threads)
        F(decoder_share)(a, &w);
    }
    F(release)(&w);
    return problem;
}
