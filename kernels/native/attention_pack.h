/* The keys and values of a tile, from the paged cache into packed form; the contract of attention is
 * kernels/attention/__init__.py.
 *
 * Rows are (query, head) pairs that share a key head. The keys of a row are cut at multiples of
 * SEGMENT; a segment is an online softmax of its own over tiles of TILE keys, and segments are
 * merged in order. Keys are packed so that a lane is a key, values so that a lane is a dimension;
 * each is read once for all rows of a block.
 *
 * Invariants: what is computed for a row depends on its own query, position and keys, never on the
 * rows beside it, on how the work was cut, or on the number of threads; slots that no row of a
 * block sees are not read; a value that a row does not see is not multiplied, not even by 0, where
 * it could be NaN.
 */

typedef struct F(task) {
    int64_t seq, kv_head;
    int64_t first_query, end_query; /* within the sequence */
    int64_t first_segment, end_segment;
    float *partial; /* null: the task sees all segments and writes the result */
} F(task);

typedef struct F(span) {
    int64_t first, end;
} F(span);

/* Buffers of one task, on the stack of its thread. */
typedef struct F(scratch) {
    float *q;      /* (rows, q_words) */
    float *keys;   /* (q_words, TILE) */
    float *values; /* (TILE or TILE / 2, padded_dim) */
    float *hidden; /* values again, with the keys that a row does not see zeroed */
    float *sums;   /* (rows, padded_dim), of the segment */
    float *totals; /* (rows, padded_dim), of the segments so far */
    float *key_scales, *value_scales; /* (TILE), of a cache of bytes; else not used */
    float *peaks, *denominators, *total_peaks, *total_denominators; /* (rows) */
    const F(task) *next_task;
} F(scratch);

typedef struct F(shape) {
    int64_t group, q_words, padded_dim;
    int pairs; /* products are of bfloat16 */
    int cell;  /* what the cache holds */
} F(shape);

INLINE F(shape) F(shape_of)(const attention_arguments *a) {
    F(shape) s;
    s.group = a->num_heads / a->num_kv_heads;
    s.pairs = ISA_LEVEL >= 4 && a->is_bf16;
    s.q_words = s.pairs ? a->head_dim / 2 : a->head_dim;
    s.cell = a->kv_bytes ? (int)a->kv_bytes : a->is_bf16 ? BF16S : FLOATS;
    s.padded_dim = (a->head_dim + LANES - 1) / LANES * LANES;
    return s;
}

INLINE int64_t F(cell_bytes)(const int cell) {
    return cell >= INT8S ? 1 : cell == BF16S ? 2 : 4;
}

INLINE int64_t F(seqlen_q)(const attention_arguments *a, int64_t seq) {
    return a->cu_seqlens_q[seq + 1] - a->cu_seqlens_q[seq];
}

/* The keys that a query sees; both ends grow with the query. */
INLINE F(span) F(visible)(const attention_arguments *a, int64_t seq, int64_t query) {
    int64_t length = a->seqlens_k[seq];
    int64_t position = length - F(seqlen_q)(a, seq) + query;
    F(span) s = {0, length};
    if (a->causal && position + 1 < length) s.end = position + 1;
    if (a->window > 0 && position - a->window + 1 > 0) s.first = position - a->window + 1;
    if (s.end < 0) s.end = 0;
    if (s.first > s.end) s.first = s.end;
    return s;
}

/* Row addresses of one tile's keys and values; `absent` where there is none to read. */
typedef struct F(tile_rows) {
    const char *keys[TILE], *values[TILE];
} F(tile_rows);

static void F(find_rows)(
    F(tile_rows) *rows, const attention_arguments *a, const F(task) *t, int64_t tile,
    F(span) seen, const char *absent) {
    const char **keys = rows->keys, **values = rows->values;
    int64_t width = F(cell_bytes)(F(shape_of)(a).cell);
    const int32_t *table = a->block_table + t->seq * a->table_row;
    const char *key_head = (const char *)a->k + t->kv_head * a->k_head * width;
    const char *value_head = (const char *)a->v + t->kv_head * a->v_head * width;
    int64_t first = seen.first > tile ? seen.first - tile : 0;
    int64_t end = seen.end < tile + TILE ? seen.end - tile : TILE;
    for (int64_t i = 0; i < first; i++) keys[i] = values[i] = absent;
    int64_t index = (tile + first) / a->block_size, offset = (tile + first) % a->block_size;
    for (int64_t i = first; i < end; index++, offset = 0) {
        const char *key = key_head + (table[index] * a->k_block + offset * a->k_slot) * width;
        const char *value = value_head + (table[index] * a->v_block + offset * a->v_slot) * width;
        for (; offset < a->block_size && i < end; offset++, i++) {
            keys[i] = key;
            values[i] = value;
            key += a->k_slot * width;
            value += a->v_slot * width;
        }
    }
    for (int64_t i = end; i < TILE; i++) keys[i] = values[i] = absent;
}

/* One word of each lane, two neighbours in it as bfloat16; the later one in the upper half. */
INLINE vf F(join)(vf even, vf odd) {
    return (vf)(((vu)even >> 16) | ((vu)odd & 0xFFFF0000u));
}

/* LANES elements of a row, from element i; past its end, or without a row, they read as 0. */
INLINE vf F(cells)(const char *row, int64_t i, int64_t count, const int cell) {
    if (!row) return (vf){0};
    if (cell >= INT8S) {
        int8_t padded[LANES] = {0};
        const int8_t *bytes = (const int8_t *)row + i;
        if (i + LANES > count) bytes = memcpy(padded, bytes, (size_t)(count - i));
        return cell == FP8S ? F(load_e4m3)(bytes) : F(load_bytes)(bytes);
    }
    if (i + LANES <= count) return F(load_as_float)(row, i, cell);
    return F(load_some_as_float)(row, i, (int)(count - i), cell);
}

/* LANES pairs of bytes, from pair i, as pairs of bfloat16, which hold them exactly. */
INLINE vf F(byte_pairs)(const char *row, int64_t i, int64_t words, const int cell) {
    vh pairs = {0};
    if (i + LANES <= words)
        memcpy(&pairs, row + 2 * i, sizeof pairs);
    else
        memcpy(&pairs, row + 2 * i, (size_t)(2 * (words - i)));
#if ISA_LEVEL >= 2
    vi wide = (vi)_mm512_cvtepu16_epi32((__m256i)pairs);
#else
    vi wide = (vi)__builtin_convertvector(pairs, vu);
#endif
    if (cell == FP8S) return F(join)(F(from_e4m3)(wide & 0xFF), F(from_e4m3)(wide >> 8));
    return F(join)(F(to_float)((wide << 24) >> 24), F(to_float)((wide << 16) >> 24));
}

/* LANES words of a row of keys, from word i; a row that is not there reads as 0. */
INLINE vf F(key_words)(
    const char *row, int64_t i, int64_t words, const int pairs, const int cell) {
    if (!row) return (vf){0};
    if (pairs && cell >= INT8S) return F(byte_pairs)(row, i, words, cell);
    return F(cells)(row, i, words, pairs ? FLOATS : cell);
}

/* Asks for a row that the next tile will want. Into the second-level cache: a processor keeps
 * more such requests in flight than into the first. */
INLINE void F(prefetch)(const char *row, int64_t bytes) {
    if (row)
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

INLINE void F(pack_keys_typed)(
    float *packed, const char *const *rows, const char *const *next, int64_t count, int64_t words,
    const int pairs, const int cell) {
    int64_t bytes = words * (1 + pairs) * F(cell_bytes)(cell);
    for (int64_t lane = 0; lane < count; lane += LANES) {
        for (int r = 0; r < LANES; r++) F(prefetch)(next[lane + r], bytes);
        for (int64_t i = 0; i < words; i += LANES) {
            vf block[LANES];
            for (int r = 0; r < LANES; r++)
                block[r] = F(key_words)(rows[lane + r], i, words, pairs, cell);
            F(transpose)(block);
            int64_t kept = words - i < LANES ? words - i : LANES;
            for (int64_t r = 0; r < kept; r++)
                F(store)(packed + (i + r) * TILE + lane, block[r]);
        }
    }
    for (int64_t i = (count + LANES - 1) / LANES * LANES; i < TILE; i++)
        F(prefetch)(next[i], bytes);
}

/* (q_words, TILE): the first `count` keys, rounded up to whole vectors. */
static void F(pack_keys)(
    float *packed, const F(tile_rows) *rows, const F(tile_rows) *next, int64_t count,
    const F(shape) *s) {
    const char *const *now = rows->keys, *const *later = next->keys;
    int64_t words = s->q_words;
    if (s->pairs && s->cell == INT8S)
        F(pack_keys_typed)(packed, now, later, count, words, 1, INT8S);
    else if (s->pairs && s->cell == FP8S)
        F(pack_keys_typed)(packed, now, later, count, words, 1, FP8S);
    else if (s->pairs)
        F(pack_keys_typed)(packed, now, later, count, words, 1, BF16S);
    else if (s->cell == INT8S)
        F(pack_keys_typed)(packed, now, later, count, words, 0, INT8S);
    else if (s->cell == FP8S)
        F(pack_keys_typed)(packed, now, later, count, words, 0, FP8S);
    else if (s->cell == BF16S)
        F(pack_keys_typed)(packed, now, later, count, words, 0, BF16S);
    else
        F(pack_keys_typed)(packed, now, later, count, words, 0, FLOATS);
}

/* The scales of a tile's rows, 0 where there is no row. */
static void F(pack_scales)(float *scales, const char *const *rows, int64_t head_dim) {
    for (int64_t key = 0; key < TILE; key++) {
        scales[key] = 0.0f;
        if (rows[key]) memcpy(scales + key, rows[key] + head_dim, sizeof *scales);
    }
}

/* (count, padded_dim), or (count / 2, padded_dim) in pairs; returns whether all are finite. */
INLINE int F(pack_values_typed)(
    float *packed, const char *const *rows, const char *const *next, int64_t count, int64_t dim,
    int64_t padded, const int pairs, const int cell) {
    int64_t bytes = dim * F(cell_bytes)(cell);
    vi odd_ones = {0};
    for (int64_t key = 0; key < count; key += 1 + pairs) {
        F(prefetch)(next[key], bytes);
        if (pairs) F(prefetch)(next[key + 1], bytes);
        for (int64_t i = 0; i < padded; i += LANES) {
            vf x = F(cells)(rows[key], i, dim, cell);
            /* Bytes are finite; what is not is their scale. */
            if (cell < INT8S) odd_ones |= ((vi)x & 0x7F800000) == 0x7F800000;
            if (pairs) {
                vf next = F(cells)(rows[key + 1], i, dim, cell);
                if (cell < INT8S) odd_ones |= ((vi)next & 0x7F800000) == 0x7F800000;
                x = F(join)(x, next);
            }
            F(store)(packed + key / (1 + pairs) * padded + i, x);
        }
    }
    for (int64_t key = (count + pairs) / (1 + pairs) * (1 + pairs); key < TILE; key++)
        F(prefetch)(next[key], bytes);
    int32_t any = 0;
    for (int i = 0; i < LANES; i++) any |= odd_ones[i];
    return any == 0;
}

static int F(pack_values)(
    float *packed, const F(tile_rows) *rows, const F(tile_rows) *next, int64_t count,
    const attention_arguments *a, const F(shape) *s) {
    int64_t dim = a->head_dim, padded = s->padded_dim;
    const char *const *now = rows->values, *const *later = next->values;
    if (s->pairs && s->cell == INT8S)
        return F(pack_values_typed)(packed, now, later, count, dim, padded, 1, INT8S);
    if (s->pairs && s->cell == FP8S)
        return F(pack_values_typed)(packed, now, later, count, dim, padded, 1, FP8S);
    if (s->pairs) return F(pack_values_typed)(packed, now, later, count, dim, padded, 1, BF16S);
    if (s->cell == INT8S)
        return F(pack_values_typed)(packed, now, later, count, dim, padded, 0, INT8S);
    if (s->cell == FP8S)
        return F(pack_values_typed)(packed, now, later, count, dim, padded, 0, FP8S);
    if (s->cell == BF16S)
        return F(pack_values_typed)(packed, now, later, count, dim, padded, 0, BF16S);
    return F(pack_values_typed)(packed, now, later, count, dim, padded, 0, FLOATS);
}

/* A copy of packed values in which the keys outside [first, end) are 0. */
static void F(hide_values)(
    float *copy, const float *packed, int64_t first, int64_t end, int64_t count,
    const F(shape) *s) {
    for (int64_t key = 0; key < count; key++) {
        int64_t from = key / (1 + s->pairs) * s->padded_dim;
        uint32_t kept = s->pairs ? (key & 1 ? 0xFFFF0000u : 0xFFFFu) : 0xFFFFFFFFu;
        if (key % (1 + s->pairs) == 0) memset(copy + from, 0, (size_t)s->padded_dim * 4);
        if (key < first || key >= end) continue;
        for (int64_t i = 0; i < s->padded_dim; i++) {
            uint32_t word, held;
            memcpy(&word, packed + from + i, 4);
            memcpy(&held, copy + from + i, 4);
            held |= word & kept;
            memcpy(copy + from + i, &held, 4);
        }
    }
}
