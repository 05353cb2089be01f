/* The indexer over packed MXFP4 keys: scores, choice of entries, candidate blocks.
 * Source: model specification, sections 2.7 and 2.8. T rows, Hi index heads, di index width.
 *
 * Scores are kept as bfloat16 in an order-preserving 16-bit form, since both profiles end there; a choice is then exact
 * by counting, with the lowest index first among equals. */
#include <stdlib.h>

#include "grids.h"
#include "parallel.h"

#define KEYS 32     /* keys of a tile */
#define ROWS 32     /* rows of a chunk worked on together */
#define MOST_PAIRS 256
#define HEADS 8

typedef struct {
    const uint8_t *pool;
    int64_t block_bytes, data_offset, scale_offset, entries, channels;
} Keys;

INLINE void key_at(const Keys *k, const int64_t *table, int64_t entry, const uint8_t **data, const uint8_t **scales) {
    const uint8_t *block = k->pool + table[entry / k->entries] * k->block_bytes;
    int64_t slot = entry % k->entries;
    *data = block + k->data_offset + slot * (k->channels / 2);
    *scales = block + k->scale_offset + slot * (k->channels / 32);
}

/* 16 keys -> tile[pair][key], at stride 2 vectors; a NULL key is zero */
INLINE void load_keys(const uint8_t *const *data, const uint8_t *const *scales, int64_t channels, vu *tile) {
    static const uint8_t nothing[64];
    for (int64_t d = 0; d < channels / 8; d += LANES) { /* 16 words of 8 channels */
        vu words[16];
        UNROLL for (int i = 0; i < LANES; i++) words[i] = load_u(data[i] ? data[i] + 4 * d : nothing);
        transpose16(words);
        for (int w = 0; w < LANES; w += 4) { /* four words, 32 channels, one scale */
            float lanes[LANES];
            for (int i = 0; i < LANES; i++) lanes[i] = scales[i] ? value_e8m0(scales[i][(d + w) / 4]) : 0.0f;
            vf scale = load_f(lanes);
            UNROLL for (int u = 0; u < 4; u++)
                UNROLL for (int b = 0; b < 4; b++) {
                    vu x = words[w + u] >> (8 * b);
                    tile[2 * (4 * (d + w + u) + b)] =
                        pair_exact(nibble_values(x) * scale, nibble_values(x >> 4) * scale);
                }
        }
    }
}

/* bfloat16 to a 16-bit number that grows with it; both zeros are one */
INLINE vu ordered(vf x) {
    vu bits = as_u(x + splat(0.0f)) >> 16;
    return pick_u((vi)(bits << 16) < 0, bits ^ 0xffffu, bits | 0x8000u) & 0xffffu;
}

/* one row against `vectors` x 16 keys */
INLINE void score_tile(const bf16 *q, const float *w, int64_t heads, int64_t pairs, const vu *tile, int round_scores,
                       uint16_t *out, int vectors) {
    vf sums[2] = {zeros(), zeros()};
    for (int64_t h = 0; h < heads; h += HEADS) {
        vf acc[HEADS * 2];
        UNROLL for (int i = 0; i < HEADS * 2; i++) acc[i] = zeros();
        int some = heads - h < HEADS ? (int)(heads - h) : HEADS;
        if (some == HEADS) {
            for (int64_t j = 0; j < pairs; j++)
                UNROLL for (int i = 0; i < HEADS; i++) {
                    uint32_t pair;
                    memcpy(&pair, q + (h + i) * 2 * pairs + 2 * j, 4);
                    vu p = splat_u(pair);
                    UNROLL for (int v = 0; v < vectors; v++) acc[2 * i + v] = dot_pairs(acc[2 * i + v], p, tile[2 * j + v]);
                }
        } else {
            UNROLL for (int i = 0; i < HEADS; i++)
                for (int64_t j = 0; i < some && j < pairs; j++) {
                    uint32_t pair;
                    memcpy(&pair, q + (h + i) * 2 * pairs + 2 * j, 4);
                    vu p = splat_u(pair);
                    UNROLL for (int v = 0; v < vectors; v++) acc[2 * i + v] = dot_pairs(acc[2 * i + v], p, tile[2 * j + v]);
                }
        }
        UNROLL for (int i = 0; i < HEADS; i++)
            for (int v = 0; i < some && v < vectors; v++) {
                vf x = acc[2 * i + v];
                if (round_scores) x = round_bf_v(x);
                x = at_least(x, zeros()) * splat(w[h + i]);
                if (round_scores) x = round_bf_v(x);
                sums[v] += x;
            }
    }
    for (int v = 0; v < vectors; v++) {
        vh packed = __builtin_convertvector(ordered(round_bf_v(sums[v])), vh);
        memcpy(out + v * LANES, &packed, sizeof packed);
    }
}

/* ---- choice ---- */

INLINE int64_t count_from(const uint16_t *x, int64_t n, uint16_t low) {
    int64_t count = 0, i = 0;
    typedef int16_t vs __attribute__((vector_size(64)));
    vh2 level = (vh2){0} + low;
    while (i + 32 <= n) {
        vs lanes = {0};
        int64_t end = n - n % 32 < i + 32 * 16384 ? n - n % 32 : i + 32 * 16384;
        for (; i < end; i += 32) {
            vh2 v;
            memcpy(&v, x + i, sizeof v);
            lanes -= (vs)(v >= level);
        }
        for (int l = 0; l < 32; l++) count += lanes[l];
    }
    for (; i < n; i++) count += x[i] >= low;
    return count;
}

/* indices of the k largest, ascending, ties to the lowest index; -1 behind. numbers NULL: the index itself */
static void choose(const uint16_t *x, int64_t n, int64_t k, const int32_t *numbers, int32_t *out) {
    int64_t have = 0;
    uint32_t low = 0, room = 0;
    if (n > k) {
        uint32_t high = 0x10000; /* count(low) >= k > count(high) */
        while (high - low > 1) {
            uint32_t middle = (low + high) / 2;
            int64_t count = count_from(x, n, (uint16_t)middle);
            if (count >= k) low = middle;
            else high = middle;
            if (count == k) break;
        }
        room = (uint32_t)(k - (low == 0xffffu ? 0 : count_from(x, n, (uint16_t)(low + 1))));
    } else {
        room = (uint32_t)n;
    }
    for (int64_t i = 0; i < n && have < k; i++) {
        int take = x[i] > low;
        if (x[i] == low && room) take = 1, room--;
        if (take) out[have++] = numbers ? numbers[i] : (int32_t)i;
    }
    for (; have < k; have++) out[have] = -1;
}

/* score blocks: largest of each; the newest counts as the best */
static void choose_blocks(const uint16_t *x, int64_t visible, int64_t blocks, int64_t size, uint16_t *best,
                          int32_t *out) {
    int64_t n = (visible + size - 1) / size;
    for (int64_t b = 0; b < n; b++) {
        int64_t end = (b + 1) * size < visible ? (b + 1) * size : visible;
        uint16_t top = 0;
        for (int64_t i = b * size; i < end; i++) top = x[i] > top ? x[i] : top;
        best[b] = top;
    }
    if (n) best[n - 1] = 0xffff;
    choose(best, n, blocks, NULL, out);
}

/* a row restricted to candidate blocks: gather, score, choose */
static void restricted_row(const bf16 *q, const float *w, int64_t heads, const Keys *keys, const int64_t *table,
                           int64_t visible, int64_t topk, int round_scores, const int32_t *blocks, int64_t num_blocks,
                           int64_t size, uint16_t *scores, int32_t *numbers, vu *tile, int32_t *out) {
    int64_t n = 0;
    for (int64_t b = 0; b < num_blocks; b++)
        if (blocks[b] >= 0)
            for (int64_t i = blocks[b] * size; i < (blocks[b] + 1) * size && i < visible; i++) numbers[n++] = (int32_t)i;
    if (n > topk)
        for (int64_t at = 0; at < n; at += LANES) {
            const uint8_t *data[LANES], *scales[LANES];
            for (int i = 0; i < LANES; i++) {
                data[i] = scales[i] = NULL;
                if (at + i < n) key_at(keys, table, numbers[at + i], &data[i], &scales[i]);
            }
            load_keys(data, scales, keys->channels, tile);
            score_tile(q, w, heads, keys->channels / 2, tile, round_scores, scores + at, 1);
        }
    else
        memset(scores, 0, (size_t)n * 2);
    choose(scores, n, topk, numbers, out);
}

/* q [T, Hi, di] packed bfloat16, w [T, Hi] float32; di a multiple of 128, at most 512; chunks [C, 2]: first row, rows;
 * tables [C, table_width]; restrict_to NULL or [T, R]; emitted NULL or [T, emit], not both. Returns 0, or 1 without memory. */
int32_t benthic_index_select(const bf16 *q, const float *w, const uint8_t *pool, int64_t block_bytes,
                             int64_t data_offset, int64_t scale_offset, int64_t entries, int64_t di,
                             const int64_t *tables, int64_t table_width, const int64_t *chunks, int64_t num_chunks,
                             const int64_t *visible, int64_t heads, int64_t topk, int32_t round_scores,
                             const int32_t *restrict_to, int64_t num_restrict, int32_t *out, int32_t *emitted,
                             int64_t emit, int64_t size, int64_t most_visible, int32_t threads) {
    Keys keys = {pool, block_bytes, data_offset, scale_offset, entries, di};
    int64_t items = 0, work = 0;
    for (int64_t c = 0; c < num_chunks; c++) items += (chunks[2 * c + 1] + ROWS - 1) / ROWS;
    int64_t *list = malloc((size_t)(items + 1) * 2 * sizeof *list);
    int64_t wide = most_visible > num_restrict * size ? most_visible : num_restrict * size;
    wide = (wide + KEYS) / KEYS * KEYS;
    for (int64_t c = 0, i = 0; list && c < num_chunks; c++)
        for (int64_t r = 0; r < chunks[2 * c + 1]; r += ROWS, i++) {
            list[2 * i] = c;
            list[2 * i + 1] = r;
        }
    for (int64_t c = 0; c < num_chunks; c++) work += chunks[2 * c + 1] * (most_visible + 64);
    int n = team(threads, work, 1 << 13);
    size_t tile_bytes = sizeof(vu) * 2 * MOST_PAIRS;
    size_t room = ((size_t)wide * (ROWS * 2 + 4 + 2) + tile_bytes + 4095) / 4096 * 4096;
    char *rooms = aligned_alloc(4096, room * (size_t)n);
    if (!list || !rooms) {
        free(list), free(rooms);
        return 1;
    }
    PARALLEL_UNEVEN(n)
    for (int64_t back = 0; back < items; back++) {
        int64_t item = items - 1 - back; /* the longest first */
        vu *tile = (vu *)(rooms + room * (size_t)this_thread());
        uint16_t *scores = (uint16_t *)((char *)tile + tile_bytes), *best = scores + wide * ROWS;
        int32_t *numbers = (int32_t *)(best + wide);
        int64_t c = list[2 * item], r = list[2 * item + 1];
        int64_t first = chunks[2 * c] + r, rows = chunks[2 * c + 1] - r < ROWS ? chunks[2 * c + 1] - r : ROWS;
        const int64_t *table = tables + c * table_width;
        if (restrict_to) {
            for (int64_t t = first; t < first + rows; t++)
                restricted_row(q + t * heads * di, w + t * heads, heads, &keys, table, visible[t], topk, round_scores,
                               restrict_to + t * num_restrict, num_restrict, size, scores, numbers, tile,
                               out + t * topk);
        } else {
            int64_t most = 0;
            int need[ROWS];
            for (int64_t t = 0; t < rows; t++) {
                int64_t seen = visible[first + t];
                need[t] = seen > topk || (emit && (seen + size - 1) / size > emit);
                if (need[t] && seen > most) most = seen;
                if (!need[t]) memset(scores + t * wide, 0, (size_t)seen * 2);
            }
            for (int64_t at = 0; at < most; at += KEYS) {
                for (int v = 0; v < 2; v++) {
                    const uint8_t *data[LANES], *scales[LANES];
                    for (int i = 0; i < LANES; i++) {
                        data[i] = scales[i] = NULL;
                        int64_t e = at + v * LANES + i;
                        if (e < most) key_at(&keys, table, e, &data[i], &scales[i]);
                    }
                    load_keys(data, scales, di, tile + v);
                }
                for (int64_t t = 0; t < rows; t++)
                    if (need[t] && at < visible[first + t]) {
                        int64_t row = first + t;
                        if (di == 128)
                            score_tile(q + row * heads * 128, w + row * heads, heads, 64, tile, round_scores,
                                       scores + t * wide + at, 2);
                        else
                            score_tile(q + row * heads * di, w + row * heads, heads, di / 2, tile, round_scores,
                                       scores + t * wide + at, 2);
                    }
            }
            for (int64_t t = 0; t < rows; t++) {
                choose(scores + t * wide, visible[first + t], topk, NULL, out + (first + t) * topk);
                if (emitted)
                    choose_blocks(scores + t * wide, visible[first + t], emit, size, best, emitted + (first + t) * emit);
            }
        }
    }
    free(list), free(rooms);
    return 0;
}
