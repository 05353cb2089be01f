/* Matrix products x @ w^T with float32 accumulation and one rounding. Source: model specification, section 6.2. */
#include <stdlib.h>

#include "dots.h"
#include "ops.h"
#include "parallel.h"

#define TILE 64

INLINE void rows_bf(const bf16 *x, int64_t ldx, int64_t rows, const bf16 *w, int64_t k, int64_t n0, int64_t n1,
                    void *out, int64_t ldo, int wide_out) {
    if (wide_out) band_bf(x, ldx, rows, w, k, n0, n1, out, ldo, 1);
    else band_bf(x, ldx, rows, w, k, n0, n1, out, ldo, 0);
}

/* groups of matrices: out[t, g, :] = x[t, g, :] @ w[g]^T; strides in elements */
static void product_bf(const bf16 *x, int64_t rows, int64_t groups, int64_t k, int64_t n, int64_t ldx, int64_t gdx,
                       const bf16 *w, void *out, int64_t ldo, int64_t gdo, int wide_out, int threads) {
    int64_t size = wide_out ? 4 : 2;
    int n_threads = team(threads, rows * groups * n * k, 1 << 22);
    int64_t tiles = (rows + TILE - 1) / TILE;
    /* few rows: cut the columns as well, in bands of at least 16 that are multiples of 16 */
    int64_t bands = tiles * groups >= 2 * n_threads ? 1 : n_threads;
    int64_t band = (n + bands - 1) / bands;
    band = (band + 15) / 16 * 16;
    bands = (n + band - 1) / band;
    if (bands > 1 && n - (bands - 1) * band < 16) bands--; /* the last band takes the rest */
    PARALLEL(n_threads)
    for (int64_t i = 0; i < tiles * groups * bands; i++) {
        int64_t b = i % bands, g = i / bands % groups, t = i / bands / groups * TILE;
        int64_t count = rows - t < TILE ? rows - t : TILE;
        int64_t n0 = b * band, n1 = b == bands - 1 ? n : n0 + band;
        rows_bf(x + t * ldx + g * gdx, ldx, count, w + g * n * k, k, n0, n1, (char *)out + (t * ldo + g * gdo) * size,
                ldo, wide_out);
    }
}

void benthic_linear_bf16(const bf16 *x, int64_t rows, int64_t groups, int64_t k, int64_t n, int64_t ldx, int64_t gdx,
                         const bf16 *w, void *out, int64_t ldo, int64_t gdo, int32_t wide_out, int32_t threads) {
    product_bf(x, rows, groups, k, n, ldx, gdx, w, out, ldo, gdo, wide_out, threads);
}

/* float32 weights; x float32, or bfloat16 widened first. Returns 0, or 1 when there is no memory for the copy. */
int32_t benthic_linear_f32(const void *x, int32_t x_wide, int64_t rows, int64_t k, int64_t n, int64_t ldx,
                           const float *w, void *out, int32_t wide_out, int32_t threads) {
    float *copy = NULL;
    if (!x_wide) {
        copy = malloc((size_t)(rows * k) * sizeof *copy);
        if (!copy) return 1;
        int n_threads = team(threads, rows * k, 1 << 18);
        PARALLEL(n_threads)
        for (int64_t t = 0; t < rows; t++)
            for (int64_t j = 0; j < k; j += LANES) store_f(copy + t * k + j, load_bf((const bf16 *)x + t * ldx + j));
        ldx = k;
    }
    const float *from = x_wide ? (const float *)x : copy;
    int64_t size = wide_out ? 4 : 2;
    int n_threads = team(threads, rows * n * k, 1 << 19);
    int64_t tiles = (rows + TILE - 1) / TILE;
    int64_t bands = tiles >= 2 * n_threads ? 1 : n_threads;
    int64_t band = (n + bands - 1) / bands;
    band = (band + 15) / 16 * 16;
    bands = (n + band - 1) / band;
    if (bands > 1 && n - (bands - 1) * band < 16) bands--;
    PARALLEL(n_threads)
    for (int64_t i = 0; i < tiles * bands; i++) {
        int64_t b = i % bands, t = i / bands * TILE;
        int64_t count = rows - t < TILE ? rows - t : TILE;
        int64_t n0 = b * band, n1 = b == bands - 1 ? n : n0 + band;
        void *to = (char *)out + t * n * size;
        if (wide_out) band_f(from + t * ldx, ldx, count, w, k, n0, n1, to, n, 1);
        else band_f(from + t * ldx, ldx, count, w, k, n0, n1, to, n, 0);
    }
    free(copy);
    return 0;
}
