/* What is done to one row: norm, rotation, rounding onto the FP8 grid. */
#ifndef BENTHIC_ROWS_H
#define BENTHIC_ROWS_H

#include "grids.h"

/* root-mean-square norm; x and y may be the same row */
INLINE void norm_row(const void *x, const float *weight, void *y, int64_t from, int64_t to, int64_t d, float eps,
                     int wide) {
    vf squares = zeros();
    for (int64_t j = 0; j < d; j += LANES) {
        vf v = load_any(x, from + j, wide);
        squares = fma_f(v, v, squares);
    }
    vf r = splat(1.0f / sqrtf(sum_lanes(squares) / (float)d + eps));
    for (int64_t j = 0; j < d; j += LANES)
        store_any(y, to + j, load_any(x, from + j, wide) * r * load_f(weight + j), wide);
}

/* bfloat16 onto the FP8 grid, a multiple of 32 channels; x and y may be the same row */
INLINE void grid_row(const bf16 *x, bf16 *y, int64_t channels) {
    for (int64_t j = 0; j < channels; j += 2 * LANES) {
        vf a = load_bf(x + j), b = load_bf(x + j + LANES);
        Power p = power_fp8(a, b);
        store_bf_exact(y + j, on_e4m3(a, p) * splat(p.scale));
        store_bf_exact(y + j + LANES, on_e4m3(b, p) * splat(p.scale));
    }
}

/* ---- rotation: model specification, section 2.4 ---- */

typedef double vd __attribute__((vector_size(64)));
typedef float vf8 __attribute__((vector_size(32)));
typedef int64_t vl __attribute__((vector_size(64)));

/* sine and cosine of 16 angles of any size below 2^31: the angle is reduced in double precision */
INLINE void turn(vf angle, vf *sine, vf *cosine) {
    float lanes[LANES], rest[LANES];
    int32_t quarter[LANES];
    store_f(lanes, angle);
    for (int h = 0; h < LANES; h += 8) {
        vf8 a;
        memcpy(&a, lanes + h, sizeof a);
        vd x = __builtin_convertvector(a, vd);
        vd n = (x * 0.63661977236758134308 + 6755399441055744.0) - 6755399441055744.0;
        vd r = (x - n * 1.57079632679489655800) - n * 6.12323399573676603587e-17;
        vf8 f = __builtin_convertvector(r, vf8);
        memcpy(rest + h, &f, sizeof f);
        vl q = __builtin_convertvector(n, vl);
        for (int i = 0; i < 8; i++) quarter[h + i] = (int32_t)q[i];
    }
    vf r = load_f(rest);
    vi q;
    memcpy(&q, quarter, sizeof q);
    vf z = r * r;
    vf s = fma_f(splat(-1.9515295891e-4f), z, splat(8.3321608736e-3f));
    s = fma_f(s, z, splat(-1.6666654611e-1f));
    s = fma_f(s * z, r, r);
    vf c = fma_f(splat(2.443315711809948e-5f), z, splat(-1.388731625493765e-3f));
    c = fma_f(c, z, splat(4.166664568298827e-2f));
    c = fma_f(c * z, z, fma_f(splat(-0.5f), z, splat(1.0f)));
    vi odd = (q & 1) != 0;
    vf a = pick(odd, c, s), b = pick(odd, s, c);
    *sine = as_f(as_u(a) ^ ((vu)(q & 2) << 30));
    *cosine = as_f(as_u(b) ^ ((vu)((q + 1) & 2) << 30));
}

#define MOST_PAIRS 128

typedef struct { /* of one position: cosines and signed sines, each twice, for the two channels of a pair */
    float cosines[2 * MOST_PAIRS], sines[2 * MOST_PAIRS];
} Turn;

INLINE void turn_of(Turn *out, int64_t position, const float *freqs, int64_t pairs, int inverse) {
    float one[LANES], two[LANES], f[LANES];
    for (int64_t j = 0; j < pairs; j += LANES) {
        int64_t have = pairs - j < LANES ? pairs - j : LANES;
        for (int i = 0; i < LANES; i++) f[i] = i < have ? freqs[j + i] : 0.0f;
        vf sine, cosine;
        turn(splat((float)position) * load_f(f), &sine, &cosine);
        store_f(one, cosine);
        store_f(two, inverse ? -sine : sine);
        for (int64_t i = 0; i < have; i++) {
            out->cosines[2 * (j + i)] = out->cosines[2 * (j + i) + 1] = one[i];
            out->sines[2 * (j + i)] = -two[i];
            out->sines[2 * (j + i) + 1] = two[i];
        }
    }
}

/* the last 2 * pairs of dh channels turn; x and y may be the same row */
INLINE void rotate_row(const void *x, void *y, int64_t from, int64_t to, int64_t dh, int64_t pairs, const Turn *by,
                       int wide) {
    int64_t plain = dh - 2 * pairs;
    int64_t size = wide ? 4 : 2;
    if (x != y || from != to)
        memcpy((char *)y + to * size, (const char *)x + from * size, (size_t)(plain * size));
    for (int64_t j = 0; j < 2 * pairs; j += LANES) {
        vf v = load_any(x, from + plain + j, wide);
        vf other = shuffle2(v, v, (vi){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
        store_any(y, to + plain + j, v * load_f(by->cosines + j) + other * load_f(by->sines + j), wide);
    }
}

#endif
