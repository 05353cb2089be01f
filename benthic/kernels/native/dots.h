/* Dot products of rows with rows: lanes along K, so that weights stay as they are stored and one row of one matrix
 * product has the same bits in any batch: lane l sums channels 32 j + 2 l, 32 j + 2 l + 1 in ascending j, then lanes
 * are added in one fixed tree. Blocks of 1 x 16 and of 4 x 4 results share that order. */
#ifndef BENTHIC_DOTS_H
#define BENTHIC_DOTS_H

#include "simd.h"

/* rows x columns = 16 results, lane r * columns + c; x rows at x + r * ldx, weight rows at w + c * ldw.
 * ahead  memory as large as these weights that will be needed next, or NULL. A processor follows one long run of
 *        addresses by itself, but not sixteen short ones side by side: with this, one row passes weights four times
 *        as fast. */
INLINE vf dots_bf(const bf16 *x, int64_t ldx, const bf16 *w, int64_t ldw, int64_t k, int rows, int columns,
                  const char *ahead) {
    vf acc[16];
    UNROLL for (int i = 0; i < 16; i++) acc[i] = zeros();
    for (int64_t j = 0; j < k; j += 2 * LANES) {
        vu wide[16];
        if (ahead) {
            UNROLL for (int c = 0; c < columns; c++) __builtin_prefetch(ahead + 64 * c, 0, 2);
            ahead += 64 * columns;
        }
        UNROLL for (int c = 0; c < columns; c++) {
            wide[c] = load_u(w + c * ldw + j);
            if (rows > 1) HOLD(wide[c]);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            vu a = load_u(x + r * ldx + j);
            UNROLL for (int c = 0; c < columns; c++) acc[r * columns + c] = dot_pairs(acc[r * columns + c], a, wide[c]);
        }
    }
    return sums16(acc);
}
INLINE vf dots_f(const float *x, int64_t ldx, const float *w, int64_t ldw, int64_t k, int rows, int columns,
                 const char *ahead) {
    vf acc[16];
    UNROLL for (int i = 0; i < 16; i++) acc[i] = zeros();
    for (int64_t j = 0; j < k; j += LANES) {
        vf wide[16];
        if (ahead) {
            UNROLL for (int c = 0; c < columns; c++) __builtin_prefetch(ahead + 64 * c, 0, 2);
            ahead += 64 * columns;
        }
        UNROLL for (int c = 0; c < columns; c++) {
            wide[c] = load_f(w + c * ldw + j);
            if (rows > 1) HOLD(wide[c]);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            vf a = load_f(x + r * ldx + j);
            UNROLL for (int c = 0; c < columns; c++) acc[r * columns + c] = fma_f(a, wide[c], acc[r * columns + c]);
        }
    }
    return sums16(acc);
}

/* four 4 x 4 blocks side by side -> four rows of 16 */
INLINE void blocks_to_rows(vf *a) {
    vf ab0 = shuffle2(a[0], a[1], (vi){0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23});
    vf ab1 = shuffle2(a[0], a[1], (vi){8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31});
    vf cd0 = shuffle2(a[2], a[3], (vi){0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23});
    vf cd1 = shuffle2(a[2], a[3], (vi){8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31});
    a[0] = shuffle2(ab0, cd0, (vi){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23});
    a[1] = shuffle2(ab0, cd0, (vi){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
    a[2] = shuffle2(ab1, cd1, (vi){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23});
    a[3] = shuffle2(ab1, cd1, (vi){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
}

INLINE void store_one(void *p, int64_t i, float x, int wide) {
    if (wide) ((float *)p)[i] = x;
    else ((bf16 *)p)[i] = to_bf(x);
}

#define CHUNK_ELEMENTS 16384 /* weights that stay in the first cache while all rows pass */

/* rows 0 .. rows-1 times weight rows n0 .. n1-1; out[r * ldo + n] float32 (wide_out) or bfloat16. A last
 * partial block of 16 columns steps back and computes a few twice, to the same bits. */
#define BAND(NAME, TYPE, DOTS)                                                                                         \
    INLINE void NAME(const TYPE *x, int64_t ldx, int64_t rows, const TYPE *w, int64_t k, int64_t n0, int64_t n1,       \
                     void *out, int64_t ldo, int wide_out) {                                                           \
        if (n1 - n0 < 16) {                                                                                            \
            for (int64_t t = 0; t < rows; t++)                                                                         \
                for (int64_t n = n0; n < n1; n++)                                                                      \
                    store_one(out, t * ldo + n, DOTS(x + t * ldx, ldx, w + n * k, k, k, 1, 1, NULL)[0], wide_out);           \
            return;                                                                                                    \
        }                                                                                                              \
        int64_t chunk = CHUNK_ELEMENTS / k / 16 * 16;                                                                  \
        if (chunk < 16) chunk = 16;                                                                                    \
        for (int64_t c0 = n0; c0 < n1; c0 += chunk) {                                                                  \
            int64_t c1 = c0 + chunk < n1 ? c0 + chunk : n1;                                                            \
            int64_t t = 0, left = (rows / 4 + rows % 4) * ((c1 - c0 + 15) / 16);                                         \
            const char *next = (const char *)(w + c1 * k);                                                             \
            const char *end = (const char *)(w + (c1 + chunk < n1 ? c1 + chunk : n1) * k);                             \
            for (; t + 4 <= rows; t += 4)                                                                              \
                for (int64_t n = c0; n < c1; n += 16, left--) {                                                        \
                    int64_t from = n + 16 <= n1 ? n : n1 - 16;                                                         \
                    vf a[4];                                                                                           \
                    for (int64_t lines = ((end - next) / 64 + left - 1) / left; lines > 0; lines--, next += 64)        \
                        __builtin_prefetch(next, 0, 2);                                                                \
                    UNROLL for (int i = 0; i < 4; i++)                                                                 \
                        a[i] = DOTS(x + t * ldx, ldx, w + (from + 4 * i) * k, k, k, 4, 4, NULL);                       \
                    blocks_to_rows(a);                                                                                 \
                    UNROLL for (int r = 0; r < 4; r++) store_any(out, (t + r) * ldo + from, a[r], wide_out);           \
                }                                                                                                      \
            for (; t < rows; t++)                                                                                      \
                for (int64_t n = c0; n < c1; n += 16) {                                                                \
                    int64_t from = n + 16 <= n1 ? n : n1 - 16;                                                         \
                    store_any(out, t * ldo + from,                                                                     \
                              DOTS(x + t * ldx, ldx, w + from * k, k, k, 1, 16, (const char *)(w + (from + 16) * k)),  \
                              wide_out);                                                                               \
                }                                                                                                      \
        }                                                                                                              \
    }
BAND(band_bf, bf16, dots_bf)
BAND(band_f, float, dots_f)

#endif
