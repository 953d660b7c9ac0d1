/* What happens between two matrix products: rotation and KV write, normalisation, activation.
 *
 * Where it feeds a product of bytes, a row is quantised while it is still in the cache.
 *
 * Each operation has a form for a team of threads, <operation>_share: every thread calls it and does
 * its part, and none goes on before all are done.
 *
 * Invariants: the formulas and rounding points of the torch references in kernels/rope.py,
 * kernels/rms_norm.py and kernels/silu_mul.py; a row's result depends on that row alone.
 */

/* Rotates one head in place, or from `from` to `to`. */
INLINE void F(rotate)(
    char *to, const char *from, const float *cos_sin, int64_t head_dim, int64_t rotary_dim,
    const int is_bf16) {
    int64_t half = rotary_dim / 2, width = is_bf16 ? 2 : 4;
    const float *cos = cos_sin, *sin = cos_sin + half;
    for (int64_t i = 0; i < half; i += LANES) {
        int count = half - i < LANES ? (int)(half - i) : LANES;
        vf a, b, c, s;
        if (count == LANES) {
            a = F(load_as_float)(from, i, is_bf16);
            b = F(load_as_float)(from, half + i, is_bf16);
            c = F(load)(cos + i);
            s = F(load)(sin + i);
            F(store_rounded)(to, i, a * c - b * s, is_bf16);
            F(store_rounded)(to, half + i, b * c + a * s, is_bf16);
        } else {
            a = F(load_some_as_float)(from, i, count, is_bf16);
            b = F(load_some_as_float)(from, half + i, count, is_bf16);
            c = F(load_some_as_float)(cos, i, count, 0);
            s = F(load_some_as_float)(sin, i, count, 0);
            F(store_some_rounded)(to, i, count, a * c - b * s, is_bf16);
            F(store_some_rounded)(to, half + i, count, b * c + a * s, is_bf16);
        }
    }
    if (to != from && rotary_dim < head_dim)
        memcpy(to + rotary_dim * width, from + rotary_dim * width,
               (size_t)((head_dim - rotary_dim) * width));
}

INLINE void F(rope_token)(const rope_write_kv_arguments *a, int64_t token, const int is_bf16) {
    int64_t width = is_bf16 ? 2 : 4, head_bytes = a->head_dim * width;
    int64_t stored = a->kv_bytes ? 1 : width;
    char *row = (char *)a->qkv + token * a->qkv_row * width;
    const float *cos_sin = a->cos_sin + token * a->cos_sin_row;
    for (int64_t h = 0; h < a->num_heads; h++)
        F(rotate)(row + h * head_bytes, row + h * head_bytes, cos_sin, a->head_dim, a->rotary_dim,
                  is_bf16);
    int64_t slot = a->slots[token];
    if (slot < 0) return;
    int64_t block = slot / a->block_size, offset = slot % a->block_size;
    for (int64_t h = 0; h < a->num_kv_heads; h++) {
        char *key = row + (a->num_heads + h) * head_bytes;
        const char *value = row + (a->num_heads + a->num_kv_heads + h) * head_bytes;
        int64_t to_key = block * a->k_block + offset * a->k_slot + h * a->k_head;
        int64_t to_value = block * a->v_block + offset * a->v_slot + h * a->v_head;
        char *stored_key = (char *)a->k + to_key * stored;
        char *stored_value = (char *)a->v + to_value * stored;
        if (a->kv_bytes) {
            F(rotate)(key, key, cos_sin, a->head_dim, a->rotary_dim, is_bf16);
            F(quantise_head)(stored_key, key, a->head_dim, is_bf16, (int)a->kv_bytes);
            F(quantise_head)(stored_value, value, a->head_dim, is_bf16, (int)a->kv_bytes);
        } else {
            F(rotate)(stored_key, key, cos_sin, a->head_dim, a->rotary_dim, is_bf16);
            memcpy(stored_value, value, (size_t)head_bytes);
        }
    }
}

static int F(slots_are_in_pool)(const rope_write_kv_arguments *a) {
    for (int64_t token = 0; token < a->num_tokens; token++)
        if (a->slots[token] >= a->num_blocks * a->block_size) return 0;
    return 1;
}

ONE_COPY void F(rope_write_kv_share)(const rope_write_kv_arguments *a) {
#pragma omp for schedule(static)
    for (int64_t token = 0; token < a->num_tokens; token++) {
        if (a->is_bf16)
            F(rope_token)(a, token, 1);
        else
            F(rope_token)(a, token, 0);
    }
}

EXPORT int F(rope_write_kv)(const rope_write_kv_arguments *a) {
    if (!F(slots_are_in_pool)(a)) return BLOCK_OUT_OF_RANGE;
    int64_t size = a->num_tokens * (a->num_heads + 2 * a->num_kv_heads) * a->head_dim;
#pragma omp parallel num_threads((int)a->num_threads) if (size > MIN_PARALLEL)
    F(rope_write_kv_share)(a);
    return DONE;
}

/* total = round(residual + x) where there is a residual; returns the sum of the squares. */
INLINE float F(add_residual)(const rms_norm_arguments *a, int64_t row, const int is_bf16) {
    int64_t size = a->hidden_size, width = is_bf16 ? 2 : 4;
    const char *x = (const char *)a->x + row * a->x_row * width;
    const char *residual = a->residual ? (const char *)a->residual + row * size * width : 0;
    char *total = residual ? (char *)a->total + row * size * width : 0;
    vf squares = (vf){0};
    for (int64_t i = 0; i < size; i += LANES) {
        int count = size - i < LANES ? (int)(size - i) : LANES;
        vf held = count == LANES ? F(load_as_float)(x, i, is_bf16)
                                 : F(load_some_as_float)(x, i, count, is_bf16);
        if (residual && count == LANES) {
            held = held + F(load_as_float)(residual, i, is_bf16);
            if (is_bf16) held = F(from_bf16)(F(to_bf16)(held));
            F(store_rounded)(total, i, held, is_bf16);
        } else if (residual) {
            held = held + F(load_some_as_float)(residual, i, count, is_bf16);
            if (is_bf16) held = F(from_bf16)(F(to_bf16)(held));
            F(store_some_rounded)(total, i, count, held, is_bf16);
        }
        squares = squares + held * held;
    }
    return F(sum)(squares);
}

INLINE void F(norm_row)(const rms_norm_arguments *a, int64_t row, const int is_bf16) {
    int64_t size = a->hidden_size, width = is_bf16 ? 2 : 4;
    float mean = F(add_residual)(a, row, is_bf16) / (float)size;
    float scale = 1.0f / sqrtf(mean + (float)a->epsilon);
    const char *from = a->residual ? (const char *)a->total + row * size * width
                                   : (const char *)a->x + row * a->x_row * width;
    char *to = (char *)a->out + row * size * width;
    for (int64_t i = 0; i < size; i += LANES) {
        int count = size - i < LANES ? (int)(size - i) : LANES;
        vf x, weight;
        if (count == LANES) {
            x = F(load_as_float)(from, i, is_bf16);
            weight = F(load_as_float)(a->weight, i, is_bf16);
        } else {
            x = F(load_some_as_float)(from, i, count, is_bf16);
            weight = F(load_some_as_float)(a->weight, i, count, is_bf16);
        }
        x = x * scale;
        if (is_bf16) x = F(from_bf16)(F(to_bf16)(x));
        if (count == LANES)
            F(store_rounded)(to, i, x * weight, is_bf16);
        else
            F(store_some_rounded)(to, i, count, x * weight, is_bf16);
    }
    if (a->to.values) F(quantise_nth)(&a->to, a->out, row, size, is_bf16);
}

ONE_COPY void F(rms_norm_share)(const rms_norm_arguments *a) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a->num_rows; row++) {
        if (a->is_bf16)
            F(norm_row)(a, row, 1);
        else
            F(norm_row)(a, row, 0);
    }
}

EXPORT int F(rms_norm)(const rms_norm_arguments *a) {
    int64_t size = a->num_rows * a->hidden_size;
#pragma omp parallel num_threads((int)a->num_threads) if (size > MIN_PARALLEL)
    F(rms_norm_share)(a);
    return DONE;
}

INLINE vf F(silu)(vf z) {
    /* The exponential stops growing at 88; beyond that the quotient is 0. */
    vf denominator = F(select)(z < -88.0f, F(splat)(INFINITY), 1.0f + F(exponential)(-z));
    return z / denominator;
}

INLINE void F(silu_row)(const silu_mul_arguments *a, int64_t row, const int is_bf16) {
    int64_t size = a->size, width = is_bf16 ? 2 : 4;
    const char *gate = (const char *)a->gate_up + row * a->gate_up_row * width;
    const char *up = gate + size * width;
    char *out = (char *)a->out + row * size * width;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        vf x = F(silu)(F(load_as_float)(gate, i, is_bf16)) * F(load_as_float)(up, i, is_bf16);
        F(store_rounded)(out, i, x, is_bf16);
    }
    if (i < size) {
        int count = (int)(size - i);
        vf x = F(silu)(F(load_some_as_float)(gate, i, count, is_bf16)) *
               F(load_some_as_float)(up, i, count, is_bf16);
        F(store_some_rounded)(out, i, count, x, is_bf16);
    }
    if (a->to.values) F(quantise_nth)(&a->to, a->out, row, size, is_bf16);
}

ONE_COPY void F(silu_mul_share)(const silu_mul_arguments *a) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a->num_rows; row++) {
        if (a->is_bf16)
            F(silu_row)(a, row, 1);
        else
            F(silu_row)(a, row, 0);
    }
}

EXPORT int F(silu_mul)(const silu_mul_arguments *a) {
    int64_t size = a->num_rows * a->size;
#pragma omp parallel num_threads((int)a->num_threads) if (size > MIN_PARALLEL)
    F(silu_mul_share)(a);
    return DONE;
}

/* The first of the largest logits, and whether all are finite. */
INLINE void F(greedy_row)(const greedy_arguments *a, int64_t row, const int is_bf16) {
    int64_t size = a->vocab_size, width = is_bf16 ? 2 : 4, i = 0;
    const char *logits = (const char *)a->logits + row * a->logits_row * width;
    vf best = F(splat)(-INFINITY);
    vi where = {0}, odd_ones = {0}, index = F(iota)();
    for (; i < size; i += LANES, index = index + LANES) {
        int count = size - i < LANES ? (int)(size - i) : LANES;
        vf x = count == LANES ? F(load_as_float)(logits, i, is_bf16)
                              : F(load_some_as_float)(logits, i, count, is_bf16);
        odd_ones |= ((vi)x & 0x7F800000) == 0x7F800000;
        if (count < LANES) x = F(select)(F(iota)() < count, x, F(splat)(-INFINITY));
        vi better = x > best;
        best = F(select)(better, x, best);
        where = (index & better) | (where & ~better);
    }
    int64_t token = where[0];
    float value = best[0];
    int32_t any = 0;
    for (int lane = 0; lane < LANES; lane++) {
        any |= odd_ones[lane];
        if (best[lane] > value || (best[lane] == value && where[lane] < token)) {
            value = best[lane];
            token = where[lane];
        }
    }
    a->finite[row] = any == 0;
    a->tokens[row] = any == 0 ? token : 0;
}

EXPORT int F(greedy)(const greedy_arguments *a) {
    int64_t size = a->num_rows * a->vocab_size;
#pragma omp parallel for schedule(static) num_threads((int)a->num_threads) if (size > MIN_PARALLEL)
    for (int64_t row = 0; row < a->num_rows; row++) {
        if (a->is_bf16)
            F(greedy_row)(a, row, 1);
        else
            F(greedy_row)(a, row, 0);
    }
    return DONE;
}
