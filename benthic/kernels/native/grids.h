/* One group through a quantiser. Source: model specification, section 6.1. */
#ifndef BENTHIC_GRIDS_H
#define BENTHIC_GRIDS_H

#include "simd.h"

/* largest magnitude of the lanes; NaN when one is NaN, since its bits are above those of infinity */
INLINE float largest(vf a, vf b) {
    vu x = as_u(a) & 0x7fffffffu, y = as_u(b) & 0x7fffffffu;
    vu m = pick_u(x > y, x, y);
    return f_of(_mm512_reduce_max_epu32((__m512i)m));
}

/* biased exponent of the smallest power of two at or above x > 0 */
INLINE uint32_t ceil_exponent(float x) { return (u_of(x) + 0x7fffffu) >> 23; }

typedef struct {
    uint32_t exponent; /* biased: the E8M0 byte */
    float scale, inverse;
} Power;

INLINE Power power(float largest_value, float floor_value, float top) {
    float a = largest_value < floor_value ? floor_value : largest_value;
    Power p;
    p.exponent = ceil_exponent(a / top);
    if (p.exponent > 255) p.exponent = 255;
    p.scale = p.exponent == 255 ? f_of(0x7fc00000u) : f_of(p.exponent << 23);
    p.inverse = 1.0f / p.scale;
    return p;
}
INLINE Power power_fp8(vf a, vf b) { return power(largest(a, b), 1e-4f, 448.0f); }
INLINE Power power_mxfp4(vf a, vf b) { return power(largest(a, b), 0x1.8p-124f, 6.0f); }

INLINE vf on_e4m3(vf x, Power p) {
    x = x * splat(p.inverse);
    return grid_e4m3(at_least(at_most(x, splat(448.0f)), splat(-448.0f)));
}
INLINE vf on_e2m1(vf x, Power p) {
    x = x * splat(p.inverse);
    return grid_e2m1(at_least(at_most(x, splat(6.0f)), splat(-6.0f)));
}
/* the E4M3 scale of a group of 16, as a value on that grid */
INLINE float scale_nvfp4(vf x) {
    float a = largest(x, x);
    if (!(a < INFINITY)) return f_of(0x7fc00000u); /* all of the group reads back as NaN */
    a = a < 0x1.8p-7f ? 0x1.8p-7f : a;
    float s = a / 6.0f;
    s = s > 448.0f ? 448.0f : s;
    return grid_e4m3(splat(s))[0];
}
INLINE vf on_e2m1_by(vf x, float scale) {
    x = x / splat(scale);
    return grid_e2m1(at_least(at_most(x, splat(6.0f)), splat(-6.0f)));
}

/* 32 or 16 values to packed bytes and one scale byte */
INLINE void pack_fp8(vf a, vf b, uint8_t *codes, uint8_t *scale) {
    Power p = power_fp8(a, b);
    vu x = code_e4m3(on_e4m3(a, p)), y = code_e4m3(on_e4m3(b, p));
    for (int i = 0; i < LANES; i++) codes[i] = (uint8_t)x[i];
    for (int i = 0; i < LANES; i++) codes[LANES + i] = (uint8_t)y[i];
    *scale = (uint8_t)p.exponent;
}
INLINE void pack_nibbles(vu code, uint8_t *out) { /* 16 codes -> 8 bytes, the even channel low */
    for (int i = 0; i < LANES / 2; i++) out[i] = (uint8_t)(code[2 * i] | (code[2 * i + 1] << 4));
}
INLINE void pack_mxfp4(vf a, vf b, uint8_t *codes, uint8_t *scale) {
    Power p = power_mxfp4(a, b);
    pack_nibbles(code_e2m1(on_e2m1(a, p)), codes);
    pack_nibbles(code_e2m1(on_e2m1(b, p)), codes + 8);
    *scale = (uint8_t)p.exponent;
}
INLINE void pack_nvfp4(vf x, uint8_t *codes, uint8_t *scale) {
    float s = scale_nvfp4(x);
    pack_nibbles(code_e2m1(on_e2m1_by(x, s)), codes);
    *scale = (uint8_t)code_e4m3(splat(s))[0];
}

/* packed bytes to values; pairs of channels (even, odd) in lanes of their own */
INLINE vu widen_bytes(const uint8_t *p) {
    typedef uint8_t vb __attribute__((vector_size(16)));
    vb x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, vu);
}
/* E2M1 values of the low four bits of each lane; the bits above are ignored */
INLINE vf nibble_values(vu x) {
    const vf table = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};
    return (vf)_mm512_permutexvar_ps((__m512i)x, (__m512)table);
}
/* (even, odd) values on the bfloat16 grid -> pairs */
INLINE vu pair_exact(vf even, vf odd) { return (as_u(even) >> 16) | as_u(odd); }

#define MOST_SCALES 64

/* one record of `channels` (a multiple of 32) to bfloat16 */
INLINE void unpack_nvfp4(const uint8_t *data, const uint8_t *scales, bf16 *out, int64_t channels) {
    float scale[MOST_SCALES];
    int64_t groups = channels / 16;
    for (int64_t g = 0; g < groups; g += LANES) {
        uint8_t bytes[LANES] = {0};
        memcpy(bytes, scales + g, (size_t)(groups - g < LANES ? groups - g : LANES));
        store_f(scale + g, value_e4m3(widen_bytes(bytes)));
    }
    for (int64_t j = 0; j < channels / 32; j++) { /* 16 bytes, 32 channels */
        vu x = widen_bytes(data + 16 * j);
        float a = scale[2 * j], b = scale[2 * j + 1];
        vf s = {a, a, a, a, a, a, a, a, b, b, b, b, b, b, b, b};
        vu pairs = pair_exact(nibble_values(x) * s, nibble_values(x >> 4) * s);
        memcpy(out + 32 * j, &pairs, sizeof pairs);
    }
}
INLINE void unpack_fp8(const uint8_t *data, const uint8_t *scales, bf16 *out, int64_t channels) {
    for (int64_t j = 0; j < channels; j += LANES)
        store_bf_exact(out + j, value_e4m3(widen_bytes(data + j)) * splat(value_e8m0(scales[j / 32])));
}
INLINE void unpack_mxfp4(const uint8_t *data, const uint8_t *scales, bf16 *out, int64_t channels) {
    for (int64_t j = 0; j < channels / 32; j++) {
        vu x = widen_bytes(data + 16 * j);
        vf s = splat(value_e8m0(scales[j]));
        vu pairs = pair_exact(nibble_values(x) * s, nibble_values(x >> 4) * s);
        memcpy(out + 32 * j, &pairs, sizeof pairs);
    }
}

/* rows become columns: lane i of a[j] and lane j of a[i] change places */
INLINE void transpose16(vu *a) {
    vf t[16], *f = (vf *)a;
    UNROLL for (int i = 0; i < 8; i++) { /* rows i and i + 8 riffled; four times over, that transposes */
        t[2 * i] = shuffle2(f[i], f[i + 8], (vi){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
        t[2 * i + 1] = shuffle2(f[i], f[i + 8], (vi){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
    }
    UNROLL for (int i = 0; i < 8; i++) {
        f[2 * i] = shuffle2(t[i], t[i + 8], (vi){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
        f[2 * i + 1] = shuffle2(t[i], t[i + 8], (vi){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
    }
    UNROLL for (int i = 0; i < 8; i++) {
        t[2 * i] = shuffle2(f[i], f[i + 8], (vi){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
        t[2 * i + 1] = shuffle2(f[i], f[i + 8], (vi){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
    }
    UNROLL for (int i = 0; i < 8; i++) {
        f[2 * i] = shuffle2(t[i], t[i + 8], (vi){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
        f[2 * i + 1] = shuffle2(t[i], t[i + 8], (vi){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
    }
}

#endif
