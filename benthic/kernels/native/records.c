/* Cache records as packed bytes. Source: model specification, section 4.1.
 * Record id = block * entries + slot; -1 reads zeros. */
#include "grids.h"
#include "parallel.h"

enum { FP8 = 0, MXFP4 = 1, NVFP4 = 2 };

INLINE int64_t data_bytes(int64_t channels, int format) { return format == FP8 ? channels : channels / 2; }
INLINE int64_t scale_bytes(int64_t channels, int format) { return format == NVFP4 ? channels / 16 : channels / 32; }

INLINE void pack_row(const void *x, int64_t at, uint8_t *data, uint8_t *scales, int64_t channels, int format,
                     int wide) {
    for (int64_t j = 0; j < channels; j += 2 * LANES) {
        vf a = load_any(x, at + j, wide), b = load_any(x, at + j + LANES, wide);
        if (format == FP8) pack_fp8(a, b, data + j, scales + j / 32);
        else if (format == MXFP4) pack_mxfp4(a, b, data + j / 2, scales + j / 32);
        else {
            pack_nvfp4(a, data + j / 2, scales + j / 16);
            pack_nvfp4(b, data + j / 2 + 8, scales + j / 16 + 1);
        }
    }
}

INLINE void unpack_row(const uint8_t *data, const uint8_t *scales, bf16 *out, int64_t channels, int format) {
    if (format == FP8) unpack_fp8(data, scales, out, channels);
    else if (format == MXFP4) unpack_mxfp4(data, scales, out, channels);
    else unpack_nvfp4(data, scales, out, channels);
}

/* where record `id` lies; channels a multiple of 32, at most 1024 */
INLINE void locate(const uint8_t *pool, int64_t block_bytes, int64_t data_offset, int64_t scale_offset,
                   int64_t entries, int64_t channels, int format, int64_t id, const uint8_t **data,
                   const uint8_t **scales) {
    const uint8_t *block = pool + id / entries * block_bytes;
    int64_t slot = id % entries, d = data_bytes(channels, format), s = scale_bytes(channels, format);
    if (format == MXFP4) {
        *data = block + data_offset + slot * d;
        *scales = block + scale_offset + slot * s;
    } else {
        *data = block + data_offset + slot * (d + s);
        *scales = *data + d;
    }
}

void benthic_write_records(uint8_t *pool, int64_t block_bytes, int64_t data_offset, int64_t scale_offset,
                           int64_t entries, int64_t channels, int32_t format, const int64_t *ids, const void *values,
                           int64_t rows, int64_t ldx, int32_t wide, int32_t threads) {
    int n = team(threads, rows, 512);
    PARALLEL(n)
    for (int64_t t = 0; t < rows; t++) {
        const uint8_t *data, *scales;
        if (ids[t] < 0) continue;
        locate(pool, block_bytes, data_offset, scale_offset, entries, channels, format, ids[t], &data, &scales);
        pack_row(values, t * ldx, (uint8_t *)data, (uint8_t *)scales, channels, format, wide);
    }
}

void benthic_read_records(const uint8_t *pool, int64_t block_bytes, int64_t data_offset, int64_t scale_offset,
                          int64_t entries, int64_t channels, int32_t format, const int64_t *ids, float *out,
                          int64_t rows, int32_t threads) {
    int n = team(threads, rows, 512);
    PARALLEL(n)
    for (int64_t t = 0; t < rows; t++) {
        bf16 row[1024];
        const uint8_t *data, *scales;
        if (ids[t] < 0) {
            memset(out + t * channels, 0, (size_t)channels * 4);
            continue;
        }
        locate(pool, block_bytes, data_offset, scale_offset, entries, channels, format, ids[t], &data, &scales);
        unpack_row(data, scales, row, channels, format);
        for (int64_t j = 0; j < channels; j += LANES) store_f(out + t * channels + j, load_bf(row + j));
    }
}

/* ring [slots, length, record] of FP8 records */
void benthic_ring_write(uint8_t *ring, int64_t length, int64_t channels, const void *kw, const int64_t *slots,
                        const int64_t *positions, int64_t rows, int64_t ldx, int32_t wide) {
    int64_t record = channels + channels / 32;
    for (int64_t t = 0; t < rows; t++) { /* ascending, so that of a long chunk the last rows stay */
        if (t + length < rows && slots[t + length] == slots[t]) continue;
        uint8_t *to = ring + (slots[t] * length + positions[t] % length) * record;
        pack_row(kw, t * ldx, to, to + channels, channels, FP8, wide);
    }
}

void benthic_read_ring(const uint8_t *ring, int64_t length, int64_t channels, const int64_t *slots,
                       const int64_t *positions, void *out, int64_t rows, int32_t wide) {
    int64_t record = channels + channels / 32;
    for (int64_t t = 0; t < rows; t++) {
        bf16 row[1024];
        int64_t at = positions[t] % length;
        const uint8_t *from = ring + (slots[t] * length + (at < 0 ? at + length : at)) * record;
        unpack_fp8(from, from + channels, wide ? row : (bf16 *)out + t * channels, channels);
        if (wide)
            for (int64_t j = 0; j < channels; j += LANES) store_f((float *)out + t * channels + j, load_bf(row + j));
    }
}

/* chunk after chunk: stored rows of positions max(0, first-window+1) .. first-1, then the chunk's own rows.
 * chunks [C, 4]: slot, first position, first row, rows; kw and out bfloat16, out NULL: no chunk has stored rows, so the
 * result is kw; reach [2, total]: where each row's window begins in out, and how many rows it has */
void benthic_window_rows(const uint8_t *ring, int64_t length, int64_t channels, const bf16 *kw, int64_t ldx,
                         const int64_t *chunks, int64_t num_chunks, int64_t window, bf16 *out, int64_t *reach,
                         int64_t total) {
    int64_t record = channels + channels / 32, at = 0;
    for (int64_t c = 0; c < num_chunks; c++) {
        int64_t slot = chunks[4 * c], first = chunks[4 * c + 1], row = chunks[4 * c + 2], rows = chunks[4 * c + 3];
        int64_t oldest = first - window + 1 > 0 ? first - window + 1 : 0, base = at;
        for (int64_t p = oldest; p < first; p++, at++) {
            const uint8_t *from = ring + (slot * length + p % length) * record;
            unpack_fp8(from, from + channels, out + at * channels, channels);
        }
        for (int64_t t = 0; t < rows; t++, at++) {
            int64_t p = first + t, begin = p - window + 1 > 0 ? p - window + 1 : 0;
            if (out) memcpy(out + at * channels, kw + (row + t) * ldx, (size_t)channels * 2);
            reach[row + t] = base + begin - oldest;
            reach[total + row + t] = p - begin + 1;
        }
    }
}
