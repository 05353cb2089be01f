/* Dot products of rows with rows: lanes along K, so that weights stay as they are stored and one row of one matrix
 * product has the same bits in any batch: lane l sums channels 32 j + 2 l, 32 j + 2 l + 1 in ascending j, then lanes
 * are added in one fixed tree. Blocks of 1 x 16, 2 x 8 and 4 x 4 results share that order. */
#ifndef BENTHIC_DOTS_H
#define BENTHIC_DOTS_H

#include "simd.h"

/* rows x columns = 16 results, lane r * columns + c; x rows at x + r * ldx, weight rows at w + c * ldw */
INLINE vf dots_bf(const bf16 *x, int64_t ldx, const bf16 *w, int64_t ldw, int64_t k, int rows, int columns) {
    vf acc[16];
    for (int i = 0; i < 16; i++) acc[i] = zeros();
    for (int64_t j = 0; j < k; j += 2 * LANES) {
        vu wide[16];
        for (int c = 0; c < columns; c++) wide[c] = load_u(w + c * ldw + j);
        for (int r = 0; r < rows; r++) {
            vu a = load_u(x + r * ldx + j);
            for (int c = 0; c < columns; c++) acc[r * columns + c] = dot_pairs(acc[r * columns + c], a, wide[c]);
        }
    }
    return sums16(acc);
}
INLINE vf dots_f(const float *x, int64_t ldx, const float *w, int64_t ldw, int64_t k, int rows, int columns) {
    vf acc[16];
    for (int i = 0; i < 16; i++) acc[i] = zeros();
    for (int64_t j = 0; j < k; j += LANES) {
        vf wide[16];
        for (int c = 0; c < columns; c++) wide[c] = load_f(w + c * ldw + j);
        for (int r = 0; r < rows; r++) {
            vf a = load_f(x + r * ldx + j);
            for (int c = 0; c < columns; c++) acc[r * columns + c] = fma_f(a, wide[c], acc[r * columns + c]);
        }
    }
    return sums16(acc);
}

/* how a block of results leaves: rows x columns lanes, of which the first `have` columns exist */
INLINE void put_block(void *out, int64_t ldo, int64_t column, vf block, int rows, int columns, int64_t have,
                      int wide_out) {
    float lanes[16];
    store_f(lanes, wide_out ? block : round_bf_v(block));
    int64_t n = have < columns ? have : columns;
    for (int r = 0; r < rows; r++) {
        if (wide_out) {
            float *p = (float *)out + r * ldo + column;
            for (int64_t c = 0; c < n; c++) p[c] = lanes[r * columns + c];
        } else {
            bf16 *p = (bf16 *)out + r * ldo + column;
            for (int64_t c = 0; c < n; c++) p[c] = (bf16)(u_of(lanes[r * columns + c]) >> 16);
        }
    }
}

/* a band of weight rows n0 .. n1-1 times `rows` x rows; out[r * ldo + n] */
#define BAND(NAME, TYPE, DOTS)                                                                                         \
    INLINE void NAME(const TYPE *x, int64_t ldx, int64_t rows, const TYPE *w, int64_t k, int64_t n0, int64_t n1,       \
                     void *out, int64_t ldo, int wide_out) {                                                           \
        int64_t size = wide_out ? 4 : 2;                                                                               \
        int64_t t = 0;                                                                                                 \
        int64_t fours = rows - rows % 4;                                                                               \
        if (fours) {                                                                                                   \
            for (int64_t n = n0; n < n1; n += 4) {                                                                     \
                int64_t from = n + 4 <= n1 ? n : (n1 - 4 >= 0 ? n1 - 4 : 0);                                           \
                for (t = 0; t < fours; t += 4) {                                                                       \
                    vf b = DOTS(x + t * ldx, ldx, w + from * k, k, k, 4, 4);                                           \
                    put_block((char *)out + t * ldo * size, ldo, from, b, 4, 4, 4, wide_out);                          \
                }                                                                                                      \
            }                                                                                                          \
            t = fours;                                                                                                 \
        }                                                                                                              \
        if (rows - t >= 2) {                                                                                           \
            for (int64_t n = n0; n < n1; n += 8) {                                                                     \
                int64_t from = n + 8 <= n1 ? n : (n1 - 8 >= 0 ? n1 - 8 : 0);                                           \
                vf b = DOTS(x + t * ldx, ldx, w + from * k, k, k, 2, 8);                                               \
                put_block((char *)out + t * ldo * size, ldo, from, b, 2, 8, 8, wide_out);                              \
            }                                                                                                          \
            t += 2;                                                                                                    \
        }                                                                                                              \
        if (rows - t == 1) {                                                                                           \
            for (int64_t n = n0; n < n1; n += 16) {                                                                    \
                int64_t from = n + 16 <= n1 ? n : (n1 - 16 >= 0 ? n1 - 16 : 0);                                        \
                vf b = DOTS(x + t * ldx, ldx, w + from * k, k, k, 1, 16);                                              \
                put_block((char *)out + t * ldo * size, ldo, from, b, 1, 16, 16, wide_out);                            \
            }                                                                                                          \
        }                                                                                                              \
    }
BAND(band_bf, bf16, dots_bf)
BAND(band_f, float, dots_f)

#endif
