/* Attention with a sink over a window of rows and selected packed records, one latent as key and value.
 * Source: model specification, section 2.5. T rows, H heads, dh head width.
 *
 * One row of the step at a time, so that its bits do not depend on the batch. Scores have a head in each lane: a key
 * pair of channels is broadcast against 16 heads. Listed rows go 64 at a time, which is where the running maximum, and
 * with it the rounding of probabilities, changes in the reference profile. */
#include <stdlib.h>

#include "grids.h"
#include "parallel.h"

enum { FP8 = 0, NVFP4 = 2 };
#define GROUP 64

typedef struct { /* one thread's room */
    vu queries[512];        /* [dh/2] channel pairs, a head a lane */
    vf scores[GROUP];       /* [row], a head a lane */
    vu high[GROUP / 2];     /* probabilities of row pairs */
    vu low[GROUP / 2];      /* what rounding took from them */
    vf sums[16 * 1024 / LANES]; /* [head][dh] */
    vu values[GROUP / 2 * 1024 / LANES]; /* [row pair][dh] pairs (row, row + 1) */
    bf16 unpacked[GROUP * 1024];
    bf16 nothing[1024];
} Room;

/* 16 rows times up to 16 heads */
INLINE void score_rows(const bf16 *const *keys, const vu *queries, int64_t dh, vf *scores, int rows) {
    vf acc[16];
    UNROLL for (int r = 0; r < rows; r++) acc[r] = zeros();
    for (int64_t j = 0; j < dh / 2; j++) {
        vu q = queries[j];
        UNROLL for (int r = 0; r < rows; r++) {
            uint32_t pair;
            memcpy(&pair, keys[r] + 2 * j, 4);
            acc[r] = dot_pairs(acc[r], splat_u(pair), q);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) scores[r] = acc[r];
}

/* sums[h][ch] += probabilities[pair][h] * values[pair][ch] for 4 heads and 64 channels */
INLINE void add_values(vf *sums, int64_t dh, const uint32_t *high, const uint32_t *low, const vu *values, int pairs,
                       int split) {
    vf acc[16];
    int64_t ld = dh / LANES;
    UNROLL for (int h = 0; h < 4; h++)
        UNROLL for (int v = 0; v < 4; v++) acc[4 * h + v] = sums[h * ld + v];
    for (int r = 0; r < pairs; r++) {
        vu x[4];
        UNROLL for (int v = 0; v < 4; v++) x[v] = values[r * ld + v];
        UNROLL for (int h = 0; h < 4; h++) {
            vu p = splat_u(high[r * LANES + h]);
            UNROLL for (int v = 0; v < 4; v++) acc[4 * h + v] = dot_pairs(acc[4 * h + v], p, x[v]);
            if (split) {
                p = splat_u(low[r * LANES + h]);
                UNROLL for (int v = 0; v < 4; v++) acc[4 * h + v] = dot_pairs(acc[4 * h + v], p, x[v]);
            }
        }
    }
    UNROLL for (int h = 0; h < 4; h++)
        UNROLL for (int v = 0; v < 4; v++) sums[h * ld + v] = acc[4 * h + v];
}

/* up to 64 listed rows into the running softmax of `heads` <= 16 heads */
INLINE void add_group(Room *room, const bf16 **keys, int count, int heads, int64_t dh, float scale, vf *peak, vf *total,
                      int started, int round_probs) {
    int padded = (count + 15) / 16 * 16;
    for (int r = count; r < padded; r++) keys[r] = room->nothing;
    for (int r = 0; r < padded; r += 16) score_rows(keys + r, room->queries, dh, room->scores + r, 16);
    vf top = *peak;
    for (int r = 0; r < count; r++) {
        room->scores[r] = room->scores[r] * splat(scale);
        top = at_least(top, room->scores[r]);
    }
    int64_t ld = dh / LANES;
    if (started) { /* earlier groups against the new maximum */
        float by[LANES];
        vf shrink = exp_down(*peak - top);
        *total *= shrink;
        store_f(by, shrink);
        for (int h = 0; h < heads; h++)
            if (by[h] != 1.0f)
                for (int64_t v = 0; v < ld; v++) room->sums[h * ld + v] *= splat(by[h]);
    } else {
        memset(room->sums, 0, sizeof(vf) * (size_t)(LANES * ld));
    }
    *peak = top;
    int pairs = (count + 1) / 2;
    vf sum = zeros();
    for (int r = 0; r < pairs; r++) {
        vf a = exp_down(room->scores[2 * r] - top), b = zeros();
        sum += a;
        if (2 * r + 1 < count) {
            b = exp_down(room->scores[2 * r + 1] - top);
            sum += b;
        }
        vh a1 = narrow_bf(a), b1 = narrow_bf(b);
        room->high[r] = pair_up(a1, b1);
        if (!round_probs) room->low[r] = pair_up(narrow_bf(a - widen_bf(a1)), narrow_bf(b - widen_bf(b1)));
    }
    *total += sum;
    for (int r = 0; r < pairs; r++) {
        const bf16 *a = keys[2 * r], *b = 2 * r + 1 < count ? keys[2 * r + 1] : room->nothing;
        for (int64_t j = 0; j < dh; j += LANES) {
            vh x, y;
            memcpy(&x, a + j, sizeof x);
            memcpy(&y, b + j, sizeof y);
            room->values[r * ld + j / LANES] = pair_up(x, y);
        }
    }
    for (int h = 0; h < heads; h += 4)
        for (int64_t v = 0; v < ld; v += 4) {
            const uint32_t *high = (const uint32_t *)room->high + h, *low = (const uint32_t *)room->low + h;
            if (round_probs) add_values(room->sums + h * ld + v, dh, high, low, room->values + v, pairs, 0);
            else add_values(room->sums + h * ld + v, dh, high, low, room->values + v, pairs, 1);
        }
}

typedef struct {
    const uint8_t *pool;
    int64_t block_bytes, offset, entries;
    int format;
    const bf16 *table; /* unpacked records, or NULL */
} Records;

INLINE void attend_row(Room *room, const bf16 *q, int heads, int64_t dh, const bf16 *rows, int64_t count,
                       const Records *where, const int64_t *records, const int32_t *places, int64_t num_records,
                       const float *sink, float scale, int round_probs, bf16 *out) {
    for (int64_t j = 0; j < dh / 2; j += LANES) {
        vu block[16];
        UNROLL for (int h = 0; h < LANES; h++) block[h] = h < heads ? load_u(q + h * dh + 2 * j) : splat_u(0);
        transpose16(block);
        UNROLL for (int i = 0; i < LANES; i++) room->queries[j + i] = block[i];
    }
    const bf16 *keys[GROUP];
    vf peak = splat(-1e30f), total = zeros();
    int started = 0;
    for (int64_t r = 0; r < count; r += GROUP) {
        int have = count - r < GROUP ? (int)(count - r) : GROUP;
        for (int i = 0; i < have; i++) keys[i] = rows + (r + i) * dh;
        add_group(room, keys, have, heads, dh, scale, &peak, &total, started, round_probs);
        started = 1;
    }
    int64_t record = where->format == FP8 ? dh + dh / 32 : dh / 2 + dh / 16;
    for (int64_t r = 0; r < num_records; r += GROUP) {
        int have = 0;
        int64_t end = r + GROUP < num_records ? r + GROUP : num_records;
        for (int64_t i = r; i < end; i++) {
            if (places) {
                if (places[i] >= 0) keys[have++] = where->table + places[i] * dh;
                continue;
            }
            if (records[i] < 0) continue;
            const uint8_t *data = where->pool + records[i] / where->entries * where->block_bytes + where->offset +
                                  records[i] % where->entries * record;
            bf16 *to = room->unpacked + have * dh;
            if (where->format == FP8) unpack_fp8(data, data + dh, to, dh);
            else unpack_nvfp4(data, data + dh / 2, to, dh);
            keys[have++] = to;
        }
        if (!have) continue;
        add_group(room, keys, have, heads, dh, scale, &peak, &total, started, round_probs);
        started = 1;
    }
    if (!started) {
        memset(out, 0, (size_t)(heads * dh) * 2);
        return;
    }
    float by[LANES], own[LANES];
    for (int h = 0; h < LANES; h++) own[h] = h < heads ? sink[h] : 0.0f;
    store_f(by, total + exp_v(load_f(own) - peak));
    for (int h = 0; h < heads; h++)
        for (int64_t v = 0; v < dh / LANES; v++)
            store_bf(out + h * dh + v * LANES, room->sums[h * (dh / LANES) + v] / splat(by[h]));
}

/* Many rows choose from the same records: each is unpacked once. table [n, dh]; places [T * K], -1 for none.
 * Returns the table, or NULL when there is nothing to share or no memory. */
static bf16 *unpack_shared(const uint8_t *pool, int64_t block_bytes, int64_t offset, int64_t entries, int format,
                           const int64_t *records, int64_t count, int64_t dh, int32_t *places, int threads) {
    int64_t lowest = INT64_MAX, highest = -1;
    for (int64_t i = 0; i < count; i++) {
        if (records[i] < 0) continue;
        lowest = records[i] < lowest ? records[i] : lowest;
        highest = records[i] > highest ? records[i] : highest;
    }
    int64_t span = highest - lowest + 1;
    if (highest < 0 || span > 16 * count) return NULL;
    int32_t *seen = calloc((size_t)span, sizeof *seen);
    int64_t *distinct = malloc((size_t)(count < span ? count : span) * sizeof *distinct);
    if (!seen || !distinct) {
        free(seen), free(distinct);
        return NULL;
    }
    int64_t n = 0;
    for (int64_t i = 0; i < count; i++) {
        if (records[i] < 0) {
            places[i] = -1;
            continue;
        }
        int32_t *place = seen + (records[i] - lowest);
        if (!*place) {
            distinct[n] = records[i];
            *place = (int32_t)++n;
        }
        places[i] = *place - 1;
    }
    bf16 *table = 2 * n <= count ? malloc((size_t)(n * dh) * sizeof *table) : NULL;
    if (table) {
        int64_t record = format == FP8 ? dh + dh / 32 : dh / 2 + dh / 16;
        int team_size = team(threads, n, 256);
        PARALLEL(team_size)
        for (int64_t i = 0; i < n; i++) {
            const uint8_t *data = pool + distinct[i] / entries * block_bytes + offset + distinct[i] % entries * record;
            if (format == FP8) unpack_fp8(data, data + dh, table + i * dh, dh);
            else unpack_nvfp4(data, data + dh / 2, table + i * dh, dh);
        }
    }
    free(seen), free(distinct);
    return table;
}

#define SHARE_FROM 16 /* rows in the step from which records are worth unpacking together */

/* q, out [T, H, dh] packed bfloat16, dh a multiple of 64, at most 1024; rows [N, dh] bfloat16; pool NULL: no records.
 * Returns 0, or 1 without memory. */
int32_t benthic_sink_attention(const bf16 *q, const bf16 *rows, const int64_t *begin, const int64_t *count,
                               const uint8_t *pool, int64_t block_bytes, int64_t offset, int64_t entries,
                               int32_t format, const int64_t *records, int64_t num_records, const float *sink,
                               bf16 *out, int64_t total, int64_t heads, int64_t dh, float scale, int32_t round_probs,
                               int32_t threads) {
    int64_t bands = (heads + LANES - 1) / LANES;
    int n = team(threads, total * bands, 8);
    size_t size = (sizeof(Room) + 4095) / 4096 * 4096;
    char *rooms = aligned_alloc(4096, size * (size_t)n);
    if (!rooms) return 1;
    for (int i = 0; i < n; i++) memset(((Room *)(rooms + size * (size_t)i))->nothing, 0, sizeof(bf16) * 1024);
    bf16 *table = NULL;
    int32_t *places = NULL;
    if (pool && total >= SHARE_FROM) {
        places = malloc((size_t)(total * num_records) * sizeof *places);
        if (places)
            table = unpack_shared(pool, block_bytes, offset, entries, format, records, total * num_records, dh, places,
                                  threads);
    }
    Records where = {pool, block_bytes, offset, entries, format, table};
    PARALLEL(n)
    for (int64_t i = 0; i < total * bands; i++) {
        int64_t t = i / bands, h = i % bands * LANES;
        int some = heads - h < LANES ? (int)(heads - h) : LANES;
        Room *room = (Room *)(rooms + size * (size_t)this_thread());
        const int64_t *listed = pool ? records + t * num_records : NULL;
        const int32_t *at = table ? places + t * num_records : NULL;
        if (dh == 128)
            attend_row(room, q + (t * heads + h) * dh, some, 128, rows + begin[t] * dh, count[t], &where, listed, at,
                       pool ? num_records : 0, sink + h, scale, round_probs, out + (t * heads + h) * dh);
        else
            attend_row(room, q + (t * heads + h) * dh, some, dh, rows + begin[t] * dh, count[t], &where, listed, at,
                       pool ? num_records : 0, sink + h, scale, round_probs, out + (t * heads + h) * dh);
    }
    free(rooms), free(table), free(places);
    return 0;
}
