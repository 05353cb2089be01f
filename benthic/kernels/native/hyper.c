/* Hyper-connections: read, write and exchange weights of the residual streams, and their use.
 * Source: model specification, section 2.2. T rows, S streams, D hidden width. */
#include <stdlib.h>

#include "dots.h"
#include "parallel.h"
#include "rows.h"

#define MOST_STREAMS 8
#define BLOCK 16 /* rows whose Sinkhorn steps run side by side, one a lane */

/* a: streams x streams vectors, one row of the step a lane */
INLINE void sinkhorn(vf *a, int streams, float eps, int iters) {
    vf e = splat(eps);
    for (int i = 0; i < streams; i++) {
        vf top = a[i * streams], sum = zeros();
        for (int o = 1; o < streams; o++) top = at_least(a[i * streams + o], top);
        for (int o = 0; o < streams; o++) {
            a[i * streams + o] = exp_v(a[i * streams + o] - top);
            sum += a[i * streams + o];
        }
        for (int o = 0; o < streams; o++) a[i * streams + o] = a[i * streams + o] / sum + e;
    }
    for (int step = 0; step < iters; step++) {
        if (step) {
            for (int i = 0; i < streams; i++) {
                vf sum = a[i * streams];
                for (int o = 1; o < streams; o++) sum += a[i * streams + o];
                vf r = splat(1.0f) / (sum + e);
                for (int o = 0; o < streams; o++) a[i * streams + o] *= r;
            }
        }
        for (int o = 0; o < streams; o++) {
            vf sum = a[o];
            for (int i = 1; i < streams; i++) sum += a[i * streams + o];
            vf r = splat(1.0f) / (sum + e);
            for (int i = 0; i < streams; i++) a[i * streams + o] *= r;
        }
    }
}

INLINE void weights_of(vf *z, const float *scale, const float *base, int streams, float hc_eps, int iters) {
    int mixes = (2 + streams) * streams;
    for (int m = 0; m < mixes; m++) {
        float by = scale[m < streams ? 0 : m < 2 * streams ? 1 : 2];
        z[m] = z[m] * splat(by) + splat(base[m]);
    }
    for (int m = 0; m < streams; m++) z[m] = sigmoid_v(z[m]) + splat(hc_eps);
    for (int m = streams; m < 2 * streams; m++) z[m] = splat(2.0f) * sigmoid_v(z[m]);
    sinkhorn(z + 2 * streams, streams, hc_eps, iters);
}

/* up to 16 rows: z[mix][row] = (fn @ s) * rsqrt(mean s^2 + eps); copy: room for 4 rows of S*D floats */
INLINE void products(const void *s, int64_t first, int64_t rows, int64_t width, const float *fn, int mixes, float eps,
                     float *z, float *copy, int wide) {
    for (int64_t t = 0; t < rows; t += 4) {
        int64_t have = rows - t < 4 ? rows - t : 4;
        float statistic[4];
        for (int64_t r = 0; r < have; r++) {
            vf squares = zeros();
            for (int64_t j = 0; j < width; j += LANES) {
                vf v = load_any(s, (first + t + r) * width + j, wide);
                store_f(copy + r * width + j, v);
                squares = fma_f(v, v, squares);
            }
            statistic[r] = 1.0f / sqrtf(sum_lanes(squares) / (float)width + eps);
        }
        float lanes[16];
        if (have == 4) {
            for (int m = 0; m < mixes; m += 4) {
                store_f(lanes, dots_f(copy, width, fn + m * width, width, width, 4, 4, NULL));
                for (int r = 0; r < 4; r++)
                    for (int c = 0; c < 4; c++) z[(m + c) * BLOCK + t + r] = lanes[4 * r + c] * statistic[r];
            }
        } else {
            for (int64_t r = 0; r < have; r++)
                for (int m = 0; m < mixes; m += 16) {
                    int from = m + 16 <= mixes ? m : mixes - 16;
                    store_f(lanes, dots_f(copy + r * width, width, fn + from * width, width, width, 1, 16, (const char *)(fn + (from + 16) * width)));
                    for (int c = 0; c < 16; c++) z[(from + c) * BLOCK + t + r] = lanes[c] * statistic[r];
                }
        }
    }
}

/* streams 4 or 8 (mixes a multiple of 4, at least 16), S*D a multiple of 16. Returns 0, or 1 without memory. */
int32_t benthic_hyper_mixes(const void *s, const float *fn, const float *scale, const float *base, float *pre,
                            float *post, float *comb, int64_t rows, int64_t streams, int64_t d, float norm_eps,
                            float hc_eps, int32_t iters, int32_t wide, int32_t threads) {
    int64_t width = streams * d, blocks = (rows + BLOCK - 1) / BLOCK;
    int mixes = (int)((2 + streams) * streams);
    int n = team(threads, blocks, 4);
    float *room = malloc((size_t)(n * 4 * width) * sizeof *room);
    if (!room) return 1;
    PARALLEL(n)
    for (int64_t b = 0; b < blocks; b++) {
        float lanes[(2 + MOST_STREAMS) * MOST_STREAMS * BLOCK];
        vf z[(2 + MOST_STREAMS) * MOST_STREAMS];
        float *mine = room + this_thread() * 4 * width;
        int64_t first = b * BLOCK, have = rows - first < BLOCK ? rows - first : BLOCK;
        memset(lanes, 0, sizeof(float) * (size_t)mixes * BLOCK);
        if (wide) products(s, first, have, width, fn, mixes, norm_eps, lanes, mine, 1);
        else products(s, first, have, width, fn, mixes, norm_eps, lanes, mine, 0);
        for (int m = 0; m < mixes; m++) z[m] = load_f(lanes + m * BLOCK);
        if (streams == 4) weights_of(z, scale, base, 4, hc_eps, iters);
        else weights_of(z, scale, base, (int)streams, hc_eps, iters);
        for (int m = 0; m < mixes; m++) store_f(lanes + m * BLOCK, z[m]);
        for (int64_t t = 0; t < have; t++) {
            for (int m = 0; m < streams; m++) pre[(first + t) * streams + m] = lanes[m * BLOCK + t];
            for (int m = 0; m < streams; m++) post[(first + t) * streams + m] = lanes[(streams + m) * BLOCK + t];
            for (int m = 0; m < streams * streams; m++)
                comb[(first + t) * streams * streams + m] = lanes[(2 * streams + m) * BLOCK + t];
        }
    }
    free(room);
    return 0;
}

INLINE void collapse_row(const void *s, const float *pre, void *y, int64_t t, int streams, int64_t d, int wide) {
    for (int64_t j = 0; j < d; j += LANES) {
        vf sum = splat(pre[t * streams]) * load_any(s, t * streams * d + j, wide);
        for (int i = 1; i < streams; i++)
            sum = fma_f(splat(pre[t * streams + i]), load_any(s, (t * streams + i) * d + j, wide), sum);
        store_any(y, t * d + j, sum, wide);
    }
}

void benthic_hyper_collapse(const void *s, const float *pre, void *y, int64_t rows, int64_t streams, int64_t d,
                            int32_t wide, int32_t threads) {
    int n = team(threads, rows * streams * d, 1 << 18);
    PARALLEL(n)
    for (int64_t t = 0; t < rows; t++) {
        if (wide) collapse_row(s, pre, y, t, (int)streams, d, 1);
        else if (streams == 4) collapse_row(s, pre, y, t, 4, d, 0);
        else collapse_row(s, pre, y, t, (int)streams, d, 0);
    }
}

/* entry of a sublayer: its weights, and what it reads by the weights of the sublayer before, normed */
int32_t benthic_hyper_read(const void *s, const float *pre, const float *fn, const float *scale, const float *base,
                           const float *weight, void *h, float *next_pre, float *post, float *comb, int64_t rows,
                           int64_t streams, int64_t d, float norm_eps, float hc_eps, int32_t iters, int32_t wide,
                           int32_t threads) {
    int n = team(threads, rows * streams * d, 1 << 18);
    PARALLEL(n)
    for (int64_t t = 0; t < rows; t++) {
        if (wide) {
            collapse_row(s, pre, h, t, (int)streams, d, 1);
            norm_row(h, weight, h, t * d, t * d, d, norm_eps, 1);
        } else {
            if (streams == 4) collapse_row(s, pre, h, t, 4, d, 0);
            else collapse_row(s, pre, h, t, (int)streams, d, 0);
            norm_row(h, weight, h, t * d, t * d, d, norm_eps, 0);
        }
    }
    return benthic_hyper_mixes(s, fn, scale, base, next_pre, post, comb, rows, streams, d, norm_eps, hc_eps, iters,
                               wide, threads);
}

INLINE void expand_row(const void *out, const void *s, const float *post, const float *comb, void *y, int64_t t,
                       int streams, int64_t d, int wide, int wide_out) {
    const float *c = comb + t * streams * streams;
    for (int64_t j = 0; j < d; j += LANES) {
        vf v[MOST_STREAMS], o = load_any(out, t * d + j, wide_out);
        for (int i = 0; i < streams; i++) v[i] = load_any(s, (t * streams + i) * d + j, wide);
        for (int k = 0; k < streams; k++) {
            vf sum = splat(c[k]) * v[0];
            for (int i = 1; i < streams; i++) sum = fma_f(splat(c[i * streams + k]), v[i], sum);
            sum = fma_f(splat(post[t * streams + k]), o, sum);
            store_any(y, (t * streams + k) * d + j, sum, wide);
        }
    }
}

void benthic_hyper_expand(const void *out, const void *s, const float *post, const float *comb, void *y, int64_t rows,
                          int64_t streams, int64_t d, int32_t wide, int32_t wide_out, int32_t threads) {
    int n = team(threads, rows * streams * d, 1 << 18);
    PARALLEL(n)
    for (int64_t t = 0; t < rows; t++) {
        if (!wide && !wide_out && streams == 4) expand_row(out, s, post, comb, y, t, 4, d, 0, 0);
        else expand_row(out, s, post, comb, y, t, (int)streams, d, wide, wide_out);
    }
}
