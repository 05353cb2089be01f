/* Block quantisers and their round trips. Source: model specification, section 6.1.
 * Groups lie one after another, so a tensor is a run of groups whatever its shape. */
#include "grids.h"
#include "parallel.h"

enum { FP8 = 0, MXFP4 = 1, NVFP4 = 2 };

INLINE void round_group(const void *x, void *y, int64_t i, int wide, int format) {
    vf a = load_any(x, i, wide), b = load_any(x, i + LANES, wide);
    if (format == FP8) {
        Power p = power_fp8(a, b);
        a = on_e4m3(a, p) * splat(p.scale);
        b = on_e4m3(b, p) * splat(p.scale);
    } else if (format == MXFP4) {
        Power p = power_mxfp4(a, b);
        a = on_e2m1(a, p) * splat(p.scale);
        b = on_e2m1(b, p) * splat(p.scale);
    } else {
        float s = scale_nvfp4(a), t = scale_nvfp4(b);
        a = on_e2m1_by(a, s) * splat(s);
        b = on_e2m1_by(b, t) * splat(t);
    }
    if (wide) {
        store_f((float *)y + i, a);
        store_f((float *)y + i + LANES, b);
    } else {
        store_bf_exact((bf16 *)y + i, a);
        store_bf_exact((bf16 *)y + i + LANES, b);
    }
}

/* x, y: `groups` runs of 32 values, bfloat16 or (wide) float32 */
void benthic_roundtrip(const void *x, void *y, int64_t groups, int32_t wide, int32_t format, int32_t threads) {
    int n = team(threads, groups, 8192);
    PARALLEL(n)
    for (int64_t g = 0; g < groups; g++) {
        if (wide) {
            if (format == FP8) round_group(x, y, g * 32, 1, FP8);
            else if (format == MXFP4) round_group(x, y, g * 32, 1, MXFP4);
            else round_group(x, y, g * 32, 1, NVFP4);
        } else {
            if (format == FP8) round_group(x, y, g * 32, 0, FP8);
            else if (format == MXFP4) round_group(x, y, g * 32, 0, MXFP4);
            else round_group(x, y, g * 32, 0, NVFP4);
        }
    }
}

/* codes: 32, 16 or 16 bytes a run of 32 values; scales: 1, 1 or 2 bytes */
void benthic_quantise(const void *x, uint8_t *codes, uint8_t *scales, int64_t groups, int32_t wide, int32_t format,
                      int32_t threads) {
    int n = team(threads, groups, 4096);
    PARALLEL(n)
    for (int64_t g = 0; g < groups; g++) {
        vf a = load_any(x, g * 32, wide), b = load_any(x, g * 32 + LANES, wide);
        if (format == FP8) pack_fp8(a, b, codes + g * 32, scales + g);
        else if (format == MXFP4) pack_mxfp4(a, b, codes + g * 16, scales + g);
        else {
            pack_nvfp4(a, codes + g * 16, scales + 2 * g);
            pack_nvfp4(b, codes + g * 16 + 8, scales + 2 * g + 1);
        }
    }
}

/* FP8 codes with one E8M0 scale per 32 -> bfloat16 or float32 */
void benthic_dequantise_fp8(const uint8_t *codes, const uint8_t *scales, void *y, int64_t groups, int32_t wide,
                            int32_t threads) {
    int n = team(threads, groups, 8192);
    PARALLEL(n)
    for (int64_t g = 0; g < groups; g++) {
        vf s = splat(value_e8m0(scales[g]));
        vf a = value_e4m3(widen_bytes(codes + g * 32)) * s, b = value_e4m3(widen_bytes(codes + g * 32 + LANES)) * s;
        if (wide) {
            store_f((float *)y + g * 32, a);
            store_f((float *)y + g * 32 + LANES, b);
        } else {
            store_bf_exact((bf16 *)y + g * 32, a);
            store_bf_exact((bf16 *)y + g * 32 + LANES, b);
        }
    }
}
