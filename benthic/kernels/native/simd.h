/* Sixteen float lanes, bfloat16 pairs and rounding, for the native CPU kernels.
 *
 * For processors with AVX-512, with or without its bfloat16 instructions. With and without, every function gives the
 * same bits but for two things: how `dot_pairs` rounds a sum of two products, and whether rounding to bfloat16 keeps
 * numbers below 2^-126 or makes them zero.
 */
#ifndef BENTHIC_SIMD_H
#define BENTHIC_SIMD_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !(defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__))
#error "this processor has no AVX-512, for which the C kernels are written"
#endif
#include <immintrin.h>

#define LANES 16
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16") /* accumulators stay in registers only when every index is a constant */
#endif
#define INLINE static inline __attribute__((always_inline))

/* keeps the compiler from reading a value again instead of holding it in a register */
#if !defined(__clang__)
#define HOLD(x) __asm__("" : "+v"(x))
#else
#define HOLD(x) (void)(x)
#endif

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));   /* 16 bfloat16 */
typedef uint16_t vh2 __attribute__((vector_size(64)));  /* 32 bfloat16 */
typedef uint16_t bf16;

INLINE vf as_f(vu x) { return (vf)x; }
INLINE vu as_u(vf x) { return (vu)x; }
INLINE float f_of(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE uint32_t u_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

INLINE vf splat(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vu splat_u(uint32_t x) { return (vu){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vf zeros(void) { return splat(0.0f); }

INLINE vf load_f(const float *p) { vf x; memcpy(&x, p, sizeof x); return x; }
INLINE void store_f(float *p, vf x) { memcpy(p, &x, sizeof x); }
INLINE vu load_u(const void *p) { vu x; memcpy(&x, p, sizeof x); return x; }

/* mask ? a : b, lane by lane; mask lanes are 0 or -1 */
INLINE vf pick(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }
INLINE vu pick_u(vi mask, vu a, vu b) { return (a & (vu)mask) | (b & ~(vu)mask); }
/* a NaN in x survives, as in torch */
INLINE vf at_least(vf x, vf low) { return pick(x < low, low, x); }
INLINE vf at_most(vf x, vf high) { return pick(x > high, high, x); }
INLINE vf magnitude(vf x) { return as_f(as_u(x) & splat_u(0x7fffffffu)); }
INLINE vf fma_f(vf a, vf b, vf c) {
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

/* ---- bfloat16 ---- */

INLINE float from_bf(bf16 x) { return f_of((uint32_t)x << 16); }
/* to nearest, ties to even; NaN stays NaN */
INLINE bf16 to_bf(float x) {
    uint32_t u = u_of(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (bf16)((u >> 16) | 0x40u);
    return (bf16)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
INLINE float round_bf(float x) { return from_bf(to_bf(x)); }

/* 16 floats rounded, as bfloat16 */
INLINE vh narrow_bf(vf x) {
#ifdef __AVX512BF16__
    return (vh)_mm512_cvtneps_pbh((__m512)x);
#else
    vu u = as_u(x);
    vu r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    return __builtin_convertvector(pick_u(x != x, (u >> 16) | 0x40u, r), vh);
#endif
}
INLINE vf widen_bf(vh x) { return as_f(__builtin_convertvector(x, vu) << 16); }
INLINE vf round_bf_v(vf x) { return widen_bf(narrow_bf(x)); }
INLINE vf load_bf(const bf16 *p) {
    vh x;
    memcpy(&x, p, sizeof x);
    return widen_bf(x);
}
INLINE void store_bf(bf16 *p, vf x) {
    vh h = narrow_bf(x);
    memcpy(p, &h, sizeof h);
}
/* the value is on the bfloat16 grid already */
INLINE void store_bf_exact(bf16 *p, vf x) {
    vh h = __builtin_convertvector(as_u(x) >> 16, vh);
    memcpy(p, &h, sizeof h);
}
/* 16 pairs: the low half from a, the high half from b */
INLINE vu pair_up(vh a, vh b) { return __builtin_convertvector(a, vu) | (__builtin_convertvector(b, vu) << 16); }

/* acc + a.low * b.low + a.high * b.high, 16 lanes of bfloat16 pairs */
INLINE vf dot_pairs(vf acc, vu a, vu b) {
#ifdef __AVX512BF16__
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc = fma_f(as_f(a << 16), as_f(b << 16), acc);
    return fma_f(as_f(a & 0xffff0000u), as_f(b & 0xffff0000u), acc);
#endif
}

/* element i of a float32 (wide) or bfloat16 tensor */
INLINE vf load_any(const void *p, int64_t i, int wide) {
    return wide ? load_f((const float *)p + i) : load_bf((const bf16 *)p + i);
}
INLINE void store_any(void *p, int64_t i, vf x, int wide) {
    if (wide) store_f((float *)p + i, x);
    else store_bf((bf16 *)p + i, x);
}

/* ---- sums across lanes, one fixed tree ---- */

INLINE vf shuffle2(vf a, vf b, vi index) {
#if defined(__clang__)
    vf r;
    for (int i = 0; i < LANES; i++) r[i] = index[i] < LANES ? a[index[i]] : b[index[i] - LANES];
    return r;
#else
    return __builtin_shuffle(a, b, index);
#endif
}
/* The four steps add lanes at distance 2, 1, 4 and 8; each halves two vectors into one. The index lists are those of
 * single shuffle instructions. */
INLINE vf fold2(vf a, vf b) {
    return shuffle2(a, b, (vi){0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29}) +
           shuffle2(a, b, (vi){2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31});
}
INLINE vf fold1(vf a, vf b) {
    return shuffle2(a, b, (vi){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}) +
           shuffle2(a, b, (vi){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
}
INLINE vf fold_quarters(vf a, vf b) {
    return shuffle2(a, b, (vi){0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}) +
           shuffle2(a, b, (vi){4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31});
}
/* lane i of the result is the sum of the lanes of a[i] */
INLINE vf sums16(const vf *a) {
    vf b[8], c[4];
    UNROLL for (int i = 0; i < 8; i++) b[i] = fold2(a[2 * i], a[2 * i + 1]);
    UNROLL for (int i = 0; i < 4; i++) c[i] = fold1(b[2 * i], b[2 * i + 1]);
    return fold_quarters(fold_quarters(c[0], c[1]), fold_quarters(c[2], c[3]));
}
INLINE float sum_lanes(vf a) {
    vf b = fold2(a, a);
    b = fold1(b, b);
    b = fold_quarters(b, b);
    b = fold_quarters(b, b);
    return b[0];
}
INLINE float max_lanes(vf a) {
    return _mm512_reduce_max_ps((__m512)a);
}

/* ---- exponential: 1 unit in the last place over the range in use; 0 below -87, infinity above 88.7 ---- */

INLINE vf exp_v(vf x) {
    vf safe = at_least(at_most(x, splat(88.7f)), splat(-87.3f));
    vf n = (safe * splat(1.44269504f) + splat(12582912.0f)) - splat(12582912.0f);
    vf r = fma_f(n, splat(-0.693359375f), safe);
    r = fma_f(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma_f(p, r, splat(1.3981999507e-3f));
    p = fma_f(p, r, splat(8.3334519073e-3f));
    p = fma_f(p, r, splat(4.1665795894e-2f));
    p = fma_f(p, r, splat(1.6666665459e-1f));
    p = fma_f(p, r, splat(5.0000001201e-1f));
    p = fma_f(p, r * r, r + splat(1.0f));
    vi e = __builtin_convertvector(n, vi);
    vi half = e >> 1; /* in two steps, so that 2^128 does not overflow before the product */
    p = p * as_f((vu)(half + 127) << 23) * as_f((vu)(e - half + 127) << 23);
    p = pick(x < splat(-87.3f), zeros(), p);
    p = pick(x > splat(88.7f), splat(INFINITY), p);
    return pick(x != x, x, p);
}
/* the same for x <= 0, or NaN */
INLINE vf exp_down(vf x) {
    vf safe = at_least(x, splat(-87.3f));
    vf n = (safe * splat(1.44269504f) + splat(12582912.0f)) - splat(12582912.0f);
    vf r = fma_f(n, splat(-0.693359375f), safe);
    r = fma_f(n, splat(2.12194440e-4f), r);
    vf p = splat(1.9875691500e-4f);
    p = fma_f(p, r, splat(1.3981999507e-3f));
    p = fma_f(p, r, splat(8.3334519073e-3f));
    p = fma_f(p, r, splat(4.1665795894e-2f));
    p = fma_f(p, r, splat(1.6666665459e-1f));
    p = fma_f(p, r, splat(5.0000001201e-1f));
    p = fma_f(p, r * r, r + splat(1.0f));
    vi e = __builtin_convertvector(n, vi);
    p = p * as_f((vu)(e + 127) << 23);
    return pick(x < splat(-87.3f), zeros(), p);
}
INLINE vf sigmoid_v(vf x) { return splat(1.0f) / (splat(1.0f) + exp_v(-x)); }

/* ---- rounding onto the small grids; |x| is within range already ---- */

/* E2M1: 0 .5 1 1.5 2 3 4 6 and negatives, ties to the even code */
INLINE vf grid_e2m1(vf x) {
    vu sign = as_u(x) & 0x80000000u;
    vf a = magnitude(x);
    vu exponent = as_u(a) & 0x7f800000u;
    exponent = pick_u(exponent < splat_u(127u << 23), splat_u(127u << 23), exponent);
    vf magic = as_f(exponent + (22u << 23));
    a = (a + magic) - magic;
    return as_f(as_u(a) | sign);
}
/* E4M3: three mantissa bits down to 2^-6, steps of 2^-9 below */
INLINE vf grid_e4m3(vf x) {
    vu sign = as_u(x) & 0x80000000u;
    vf a = magnitude(x);
    vu exponent = as_u(a) & 0x7f800000u;
    exponent = pick_u(exponent < splat_u(121u << 23), splat_u(121u << 23), exponent);
    vf magic = as_f(exponent + (20u << 23));
    a = (a + magic) - magic;
    return as_f(as_u(a) | sign);
}
/* the code of a value on the E4M3 grid */
INLINE vu code_e4m3(vf x) {
    vu u = as_u(x);
    vu a = u & 0x7fffffffu;
    vu normal = (a >> 20) - (120u << 3);
    vu small = (vu)__builtin_convertvector(as_f(a) * splat(512.0f), vi);
    vu code = pick_u(a < splat_u(121u << 23), small, normal);
    code = pick_u(a > splat_u(0x7f800000u), splat_u(0x7fu), code); /* NaN */
    return code | ((u >> 24) & 0x80u);
}
INLINE vu code_e2m1(vf x) {
    vu u = as_u(x);
    vu a = u & 0x7fffffffu;
    vu normal = (a >> 22) - (126u << 1);
    vu code = pick_u(a < splat_u(127u << 23), (vu)__builtin_convertvector(as_f(a) * splat(2.0f), vi), normal);
    code = pick_u(a > splat_u(0x7f800000u), splat_u(0), code); /* NaN: its scale says so */
    return code | ((u >> 28) & 8u);
}
INLINE vf value_e4m3(vu code) {
    vu magnitude_bits = (code & 0x7fu) << 20;
    vf x = as_f(magnitude_bits) * splat(0x1p120f);
    x = pick((code & 0x7fu) == splat_u(0x7fu), as_f(splat_u(0x7fc00000u)), x);
    return as_f(as_u(x) | ((code & 0x80u) << 24));
}
INLINE vf value_e2m1(vu code) {
    vf x = as_f((code & 7u) << 22) * splat(0x1p126f);
    return as_f(as_u(x) | ((code & 8u) << 28));
}
/* 2^(b-127), b = 0 gives 2^-127 as torch does; b = 255 is NaN */
INLINE float value_e8m0(uint8_t b) {
    if (b == 0) return f_of(0x00400000u);
    if (b == 255) return f_of(0x7fc00000u);
    return f_of((uint32_t)b << 23);
}

#endif
