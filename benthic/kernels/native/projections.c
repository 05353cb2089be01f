/* The linear parts of an attention sublayer, a tile of rows at a time, so that nothing between them leaves the cache.
 * Source: model specification, sections 2.5 and 6.2, profiles with quantisers. */
#include <stdlib.h>

#include "dots.h"
#include "parallel.h"
#include "rows.h"

#define MOST_ROWS 32

/* rows of a tile: a few tiles for each thread, whole blocks of 4 rows */
static int64_t tile_rows(int64_t rows, int threads) {
    int64_t tile = (rows + 2 * threads - 1) / (2 * threads);
    tile = (tile + 3) / 4 * 4;
    return tile < 4 ? 4 : tile > MOST_ROWS ? MOST_ROWS : tile;
}

/* h [T, D] -> queries q [T, H, dh], rotated; their input qa [T, R] on the FP8 grid; window rows kw [T, dh], rotated and
 * on the FP8 grid. R, D, dh multiples of 32. Returns 0, or 1 without memory. */
int32_t benthic_attention_inputs(const bf16 *h, const int64_t *positions, const float *freqs, const bf16 *wq_a,
                                 const float *q_norm, const bf16 *wq_b, const bf16 *wkv, const float *kv_norm, bf16 *q,
                                 bf16 *qa, bf16 *kw, int64_t rows, int64_t d, int64_t rank, int64_t heads, int64_t dh,
                                 int64_t pairs, float eps, int32_t threads) {
    int n = team(threads, rows * (d * rank + rank * heads * dh + d * dh), 1 << 22);
    int64_t tile = tile_rows(rows, n), tiles = (rows + tile - 1) / tile;
    bf16 *rooms = malloc((size_t)(n * tile * d) * sizeof *rooms);
    if (!rooms) return 1;
    PARALLEL(n)
    for (int64_t i = 0; i < tiles; i++) {
        int64_t first = i * tile, count = rows - first < tile ? rows - first : tile;
        bf16 *h8 = rooms + this_thread() * tile * d;
        bf16 *qa_t = qa + first * rank, *q_t = q + first * heads * dh, *kw_t = kw + first * dh;
        for (int64_t t = 0; t < count; t++) grid_row(h + (first + t) * d, h8 + t * d, d);
        band_bf(h8, d, count, wq_a, d, 0, rank, qa_t, rank, 0);
        band_bf(h8, d, count, wkv, d, 0, dh, kw_t, dh, 0);
        for (int64_t t = 0; t < count; t++) {
            norm_row(qa_t, q_norm, qa_t, t * rank, t * rank, rank, eps, 0);
            grid_row(qa_t + t * rank, qa_t + t * rank, rank);
        }
        band_bf(qa_t, rank, count, wq_b, rank, 0, heads * dh, q_t, heads * dh, 0);
        for (int64_t t = 0; t < count; t++) {
            Turn turn;
            turn_of(&turn, positions[first + t], freqs, pairs, 0);
            for (int64_t j = t * heads; j < (t + 1) * heads; j++) rotate_row(q_t, q_t, j * dh, j * dh, dh, pairs, &turn, 0);
            norm_row(kw_t, kv_norm, kw_t, t * dh, t * dh, dh, eps, 0);
            rotate_row(kw_t, kw_t, t * dh, t * dh, dh, pairs, &turn, 0);
            grid_row(kw_t + t * dh, kw_t + t * dh, dh);
        }
    }
    free(rooms);
    return 0;
}

/* o [T, H, dh] -> y [T, D]: turned back, through a matrix a group of heads and one over all of them. wo_a [G, R, H*dh/G],
 * wo_b [D, G*R]. Returns 0, or 1 without memory. */
int32_t benthic_attention_output(const bf16 *o, const int64_t *positions, const float *freqs, const bf16 *wo_a,
                                 const bf16 *wo_b, bf16 *y, int64_t rows, int64_t heads, int64_t dh, int64_t pairs,
                                 int64_t groups, int64_t rank, int64_t d, int32_t quantise_wo_a, int32_t threads) {
    int64_t width = heads * dh, inner = width / groups, mid = groups * rank;
    int n = team(threads, rows * (width * rank + mid * d), 1 << 22);
    int64_t tile = tile_rows(rows, n), tiles = (rows + tile - 1) / tile;
    bf16 *rooms = malloc((size_t)(n * tile * (width + mid)) * sizeof *rooms);
    if (!rooms) return 1;
    PARALLEL(n)
    for (int64_t i = 0; i < tiles; i++) {
        int64_t first = i * tile, count = rows - first < tile ? rows - first : tile;
        bf16 *back = rooms + this_thread() * tile * (width + mid), *u = back + tile * width;
        for (int64_t t = 0; t < count; t++) {
            Turn turn;
            turn_of(&turn, positions[first + t], freqs, pairs, 1);
            for (int64_t j = 0; j < heads; j++)
                rotate_row(o, back, ((first + t) * heads + j) * dh, (t * heads + j) * dh, dh, pairs, &turn, 0);
            if (quantise_wo_a) grid_row(back + t * width, back + t * width, width);
        }
        for (int64_t g = 0; g < groups; g++)
            band_bf(back + g * inner, width, count, wo_a + g * rank * inner, inner, 0, rank, u + g * rank, mid, 0);
        for (int64_t t = 0; t < count; t++) grid_row(u + t * mid, u + t * mid, mid);
        band_bf(u, mid, count, wo_b, mid, 0, d, y + first * d, d, 0);
    }
    free(rooms);
    return 0;
}
