/* One task of attention: some queries of a sequence, the heads of one key head, tile by tile.
 *
 * Each segment is an online softmax of its own; segments are merged in order, here or, where they
 * were tasks of their own, by merge_tasks with the same arithmetic.
 */

static void F(load_queries)(
    float *q, const attention_arguments *a, const F(task) *t, const F(shape) *s) {
    int64_t row = 0;
    for (int64_t query = t->first_query; query < t->end_query; query++)
        for (int64_t g = 0; g < s->group; g++, row++) {
            int64_t head = t->kv_head * s->group + g;
            int64_t element = (a->cu_seqlens_q[t->seq] + query) * a->q_row + head * a->q_head;
            float *target = q + row * s->q_words;
            if (s->pairs) {
                memcpy(target, (const uint16_t *)a->q + element, (size_t)a->head_dim * 2);
            } else if (a->is_bf16) {
                for (int64_t i = 0; i < a->head_dim; i++) {
                    uint32_t bits = (uint32_t)((const uint16_t *)a->q)[element + i] << 16;
                    memcpy(target + i, &bits, 4);
                }
            } else {
                memcpy(target, (const float *)a->q + element, (size_t)a->head_dim * 4);
            }
        }
}

/* Soft cap, ALiBi and mask on one vector of scores, whose first key is at `key`. */
INLINE vf F(modify)(
    vf scores, const attention_arguments *a, int64_t head, int64_t position, int64_t key) {
    scores = scores * (float)a->scale;
    if (a->softcap > 0.0) {
        float cap = (float)a->softcap;
        /* tanh(x) = 1 - 2 / (exp(2x) + 1) */
        scores = cap - 2.0f * cap / (F(exponential)(scores * (2.0f / cap)) + 1.0f);
    }
    if (a->alibi_slopes) {
        vf distance = F(to_float)(F(iota)() + (int32_t)(key - position));
        scores = scores + distance * a->alibi_slopes[head];
    }
    return scores;
}

/* x where a key is seen, else `other`. */
INLINE vf F(mask)(vf x, int64_t key, F(span) seen, vf other) {
    vi first = F(splat_int)((int32_t)(seen.first - key));
    vi end = F(splat_int)((int32_t)(seen.end - key));
    vi inside = (F(iota)() >= first) & (F(iota)() < end);
    return F(select)(inside, x, other);
}

INLINE int F(is_partly_seen)(int64_t key, F(span) seen) {
    return key < seen.first || key + LANES > seen.end;
}

/* Scores of a row become weights (bfloat16 in pairs where the sums are); returns what the sums so
 * far are to be multiplied by. `seen` and the row's keys count from the start of the tile. Keys and
 * values in bytes bring their scales: those of keys belong to the scores, those of values to the
 * weights, but not to the denominator. */
INLINE float F(weigh)(
    float *scores, float *peak, float *denominator, const attention_arguments *a,
    const F(scratch) *w, int64_t head, int64_t position, F(span) seen, int64_t count,
    const int pairs) {
    vf held[TILE / LANES], highest = F(splat)(-INFINITY);
    int vectors = (int)((count + LANES - 1) / LANES);
    for (int n = 0; n < vectors; n++) {
        int64_t key = n * LANES;
        held[n] = F(load)(scores + key);
        if (a->kv_bytes) held[n] = held[n] * F(load)(w->key_scales + key);
        held[n] = F(modify)(held[n], a, head, position, key);
        if (F(is_partly_seen)(key, seen))
            held[n] = F(mask)(held[n], key, seen, F(splat)(-INFINITY));
        highest = F(maximum)(held[n], highest);
    }
    float tile_peak = F(largest)(highest);
    float now = tile_peak > *peak ? tile_peak : *peak;
    float base = now == -INFINITY ? 0.0f : now;
    float factor = F(exponential_of_one)(*peak - base);
    vf total = (vf){0};
    for (int n = 0; n < vectors; n++) {
        vf weight = F(exponential)(held[n] - base);
        total = total + weight;
        if (a->kv_bytes) {
            weight = weight * F(load)(w->value_scales + n * LANES);
            /* What is not seen may have a scale that is not finite. */
            if (F(is_partly_seen)(n * LANES, seen))
                weight = F(mask)(weight, n * LANES, seen, (vf){0});
        }
#if ISA_LEVEL >= 4
        if (pairs) {
            __m256bh narrow = _mm512_cvtneps_pbh((__m512)weight);
            memcpy((uint16_t *)scores + n * LANES, &narrow, sizeof narrow);
            continue;
        }
#else
        (void)pairs;
#endif
        F(store)(scores + n * LANES, weight);
    }
    *denominator = *denominator * factor + F(sum)(total);
    *peak = now;
    return factor;
}

/* One tile for up to MAX_ROWS rows from `row` on. */
static void F(attend_rows)(
    const attention_arguments *a, const F(task) *t, const F(shape) *s, F(scratch) *w, int64_t row,
    int rows, int64_t tile, int64_t count, int finite) {
    float scores[MAX_ROWS * TILE], factors[MAX_ROWS];
    F(span) seen[MAX_ROWS];
    int64_t length = a->seqlens_k[t->seq], seqlen_q = F(seqlen_q)(a, t->seq);
    int64_t whole = (count + LANES - 1) / LANES * LANES;
    int any = 0, all = 1;
    for (int r = 0; r < rows; r++) {
        seen[r] = F(visible)(a, t->seq, t->first_query + (row + r) / s->group);
        seen[r].first -= tile;
        seen[r].end -= tile;
        any |= seen[r].end > 0 && seen[r].first < count && seen[r].end > seen[r].first;
        all &= seen[r].first <= 0 && seen[r].end >= count;
    }
    if (!any) return;
    F(operands) dot = {w->q + row * s->q_words, s->q_words, w->keys, TILE, scores, TILE, 0, 0,
                       s->q_words};
    F(multiply)(&dot, rows, whole, s->pairs);
    for (int r = 0; r < rows; r++) {
        int64_t query = t->first_query + (row + r) / s->group;
        int64_t head = t->kv_head * s->group + (row + r) % s->group;
        int64_t position = length - seqlen_q + query - tile;
        if (s->pairs)
            factors[r] = F(weigh)(scores + r * TILE, w->peaks + row + r, w->denominators + row + r,
                                  a, w, head, position, seen[r], count, 1);
        else
            factors[r] = F(weigh)(scores + r * TILE, w->peaks + row + r, w->denominators + row + r,
                                  a, w, head, position, seen[r], count, 0);
    }
    F(operands) mix = {scores, TILE, w->values, s->padded_dim, w->sums + row * s->padded_dim,
                       s->padded_dim, factors, 0, s->pairs ? (count + 1) / 2 : count};
    if (finite || all) {
        F(multiply)(&mix, rows, s->padded_dim, s->pairs);
        return;
    }
    for (int r = 0; r < rows; r++) {
        F(hide_values)(w->hidden, w->values, seen[r].first, seen[r].end, count + (count & 1), s);
        mix.a = scores + r * TILE;
        mix.b = w->hidden;
        mix.c = w->sums + (row + r) * s->padded_dim;
        mix.factors = factors + r;
        F(multiply)(&mix, 1, s->padded_dim, s->pairs);
    }
}

#include "attention_one.h"

/* Adds a segment's (peak, denominator, sums) to the totals of a row. */
ONE_COPY void F(merge)(
    float *total_peak, float *total_denominator, float *totals, float peak, float denominator,
    const float *sums, int64_t padded_dim) {
    if (peak == -INFINITY && denominator == 0.0f) return;
    float now = peak > *total_peak ? peak : *total_peak;
    float base = now == -INFINITY ? 0.0f : now;
    float old_share = F(exponential_of_one)(*total_peak - base);
    float new_share = F(exponential_of_one)(peak - base);
    *total_peak = now;
    *total_denominator = *total_denominator * old_share + denominator * new_share;
    for (int64_t i = 0; i < padded_dim; i += LANES) {
        vf held = F(load)(totals + i) * old_share;
        F(store)(totals + i, F(load)(sums + i) * new_share + held);
    }
}

/* The first tile of the next task, if there is one, which the task before it asks for. */
static void F(find_first_rows)(
    F(tile_rows) *rows, const attention_arguments *a, const F(task) *t, const char *absent) {
    F(span) seen = {0, 0};
    int64_t tile = 0;
    if (t) {
        seen = F(visible)(a, t->seq, t->first_query);
        if (seen.first < t->first_segment * SEGMENT) seen.first = t->first_segment * SEGMENT;
        tile = seen.first / TILE * TILE;
        int64_t end = F(visible)(a, t->seq, t->end_query - 1).end;
        seen.end = end < tile + TILE ? end : tile + TILE;
    }
    if (seen.first < seen.end) {
        F(find_rows)(rows, a, t, tile, seen, absent);
        return;
    }
    for (int i = 0; i < TILE; i++) rows->keys[i] = rows->values[i] = absent;
}

/* One tile, packed, for all rows of a task. */
static void F(attend_tile)(
    const attention_arguments *a, const F(task) *t, const F(shape) *s, F(scratch) *w,
    const F(tile_rows) *now, const F(tile_rows) *next, int64_t tile, int64_t count,
    int64_t rows) {
    F(pack_keys)(w->keys, now, next, count, s);
    if (a->kv_bytes) {
        F(pack_scales)(w->key_scales, now->keys, a->head_dim);
        F(pack_scales)(w->value_scales, now->values, a->head_dim);
    }
    int finite = F(pack_values)(w->values, now, next, count, a, s);
    for (int64_t row = 0; row < rows; row += MAX_ROWS) {
        int some = rows - row < MAX_ROWS ? (int)(rows - row) : MAX_ROWS;
        F(attend_rows)(a, t, s, w, row, some, tile, count, finite);
    }
}

/* Keys `seen` of one segment; `all_seen` are those of the task, which go on after it. */
static void F(attend_segment)(
    const attention_arguments *a, const F(task) *t, const F(shape) *s, F(scratch) *w, int64_t rows,
    F(span) seen, F(span) all_seen) {
    int64_t first = seen.first / TILE * TILE;
    for (int64_t r = 0; r < rows; r++) {
        w->peaks[r] = -INFINITY;
        w->denominators[r] = 0.0f;
    }
    memset(w->sums, 0, (size_t)(rows * s->padded_dim) * 4);
    F(tile_rows) buffers[2], *now = buffers, *next = buffers + 1;
    const int one = F(takes_one)(s, rows, t->end_query - t->first_query);
    const char *absent = one ? NO_ROW : 0;
    F(find_rows)(now, a, t, first, seen, absent);
    for (int64_t tile = first; tile < seen.end; tile += TILE) {
        int64_t count = seen.end - tile < TILE ? seen.end - tile : TILE;
        if (tile + TILE < all_seen.end)
            F(find_rows)(next, a, t, tile + TILE, all_seen, absent);
        else
            F(find_first_rows)(next, a, w->next_task, absent);
#if ISA_LEVEL >= 4
        if (one)
            F(attend_one)(a, t, s, w, now, next, tile, count, (int)rows);
        else
#endif
            F(attend_tile)(a, t, s, w, now, next, tile, count, rows);
        F(tile_rows) *done = now;
        now = next;
        next = done;
    }
}

/* Divides, adds the sink, writes the row's result; row counts from the task's first. */
ONE_COPY void F(finish_row)(
    const attention_arguments *a, const F(task) *t, const F(shape) *s, int64_t row, float peak,
    float denominator, const float *totals) {
    int64_t query = t->first_query + row / s->group;
    int64_t head = t->kv_head * s->group + row % s->group;
    int64_t token = a->cu_seqlens_q[t->seq] + query;
    F(span) seen = F(visible)(a, t->seq, query);
    float share = 1.0f;
    if (a->sinks && seen.end > seen.first) {
        float sink = a->sinks[head];
        float now = sink > peak ? sink : peak;
        float base = now == -INFINITY ? 0.0f : now;
        share = F(exponential_of_one)(peak - base);
        denominator = denominator * share + F(exponential_of_one)(sink - base);
        peak = now;
    }
    if (a->lse) {
        float *lse = a->lse + token * a->lse_row + head;
        *lse = seen.end > seen.first ? peak + logf(denominator) : -INFINITY;
    }
    float factor = denominator == 0.0f ? 0.0f : share / denominator;
    int64_t element = token * a->out_row + head * a->out_head;
    char *target = (char *)a->out + element * (a->is_bf16 ? 2 : 4);
    for (int64_t i = 0; i < a->head_dim; i += LANES) {
        vf x = F(load)(totals + i) * factor;
        int count = a->head_dim - i < LANES ? (int)(a->head_dim - i) : LANES;
        if (count == LANES)
            F(store_rounded)(target, i, x, (int)a->is_bf16);
        else
            F(store_some_rounded)(target, i, count, x, (int)a->is_bf16);
    }
}

static void F(run_task)(
    const attention_arguments *a, const F(task) *t, const F(task) *next_task) {
    F(shape) s = F(shape_of)(a);
    int64_t rows = (t->end_query - t->first_query) * s.group;
    int64_t sums = rows * s.padded_dim;
    float q[rows * s.q_words], keys[s.q_words * TILE], values[TILE * s.padded_dim];
    float hidden[TILE * s.padded_dim], sums_of[sums], totals[sums], softmax[4 * rows];
    float key_scales[TILE], value_scales[TILE];
    F(scratch) w = {q, keys, values, hidden, sums_of, totals, key_scales, value_scales, softmax,
                     softmax + rows, softmax + 2 * rows, softmax + 3 * rows,
                    next_task};
    F(load_queries)(q, a, t, &s);
    F(span) first = F(visible)(a, t->seq, t->first_query);
    F(span) last = F(visible)(a, t->seq, t->end_query - 1);
    F(span) all_seen = {first.first, last.end};
    if (t->partial && all_seen.end > t->end_segment * SEGMENT)
        all_seen.end = t->end_segment * SEGMENT;
    memset(totals, 0, (size_t)sums * 4);
    for (int64_t r = 0; r < rows; r++) {
        w.total_peaks[r] = -INFINITY;
        w.total_denominators[r] = 0.0f;
    }
    for (int64_t segment = t->first_segment; segment < t->end_segment; segment++) {
        F(span) seen = {segment * SEGMENT, (segment + 1) * SEGMENT};
        if (seen.first < first.first) seen.first = first.first;
        if (seen.end > last.end) seen.end = last.end;
        if (seen.first >= seen.end) continue;
        F(attend_segment)(a, t, &s, &w, rows, seen, all_seen);
        if (t->partial) {
            memcpy(t->partial, w.peaks, (size_t)rows * 4);
            memcpy(t->partial + rows, w.denominators, (size_t)rows * 4);
            memcpy(t->partial + 2 * rows, w.sums, (size_t)sums * 4);
            return;
        }
        for (int64_t r = 0; r < rows; r++)
            F(merge)(w.total_peaks + r, w.total_denominators + r, totals + r * s.padded_dim,
                     w.peaks[r], w.denominators[r], w.sums + r * s.padded_dim, s.padded_dim);
    }
    for (int64_t r = 0; r < rows; r++)
        F(finish_row)(a, t, &s, r, w.total_peaks[r], w.total_denominators[r],
                      totals + r * s.padded_dim);
}

/* Merges the partial results of the tasks [t, t + count), one for each segment in order. */
static void F(merge_tasks)(const attention_arguments *a, const F(task) *t, int64_t count) {
    F(shape) s = F(shape_of)(a);
    int64_t rows = (t->end_query - t->first_query) * s.group;
    for (int64_t r = 0; r < rows; r++) {
        float peak = -INFINITY, denominator = 0.0f, totals[s.padded_dim];
        memset(totals, 0, sizeof totals);
        for (int64_t i = 0; i < count; i++) {
            const float *p = t[i].partial;
            F(merge)(&peak, &denominator, totals, p[r], p[rows + r],
                     p + 2 * rows + r * s.padded_dim, s.padded_dim);
        }
        F(finish_row)(a, t, &s, r, peak, denominator, totals);
    }
}
