// Before the products of the routed experts: each pair's place among the rows, which are sorted by expert, then by pair;
// and tokens as the first product reads them. Programs 0 .. a.placing - 1 do the one, a program a token the other.
//
// Set when compiled: EXPERTS, and of tokens RAW (they are not on the FP8 grid yet) and CARRIED (codes are wanted).
//
// T tokens, k slots, P = T * k pairs, R rows: the pairs whose expert is here. E experts, D hidden width.

#include "common.cuh"

constexpr int THREADS = 256;
constexpr int TURNS = 4;                    // in which a program places its pairs
constexpr int PAIRS = THREADS * TURNS;      // of a program
constexpr int UNITS = PAIRS / 32;           // of 32 pairs
constexpr u32 ALL = 0xFFFFFFFF;

struct Arguments {
    const long long* ids;  // [P] expert of each pair; negative: it is not here
    int pairs;             // P
    int placing;           // programs that place
    int* places;           // [P] row of each pair, or -1
    int* sources;          // [R] pair of each row
    int* starts;           // [E + 1] first row of each expert
    int* zeros;            // numbers that the kernel after this wants to be zero
    int many;              // of them
    const u16* x;          // [T, D] bf16
    long long x_stride;
    u16* grid;             // [T, D] bf16: x on the FP8 grid
    u8* codes;             // [T, D] E4M3 against one scale a row, in the order of `columns`
    float* scales;         // [T]
    int width;             // D
};

// ---- places ----

__device__ __forceinline__ void place(const Arguments& a) {
    __shared__ u32 all[EXPERTS], before[EXPERTS], starts[EXPERTS + 1];
    __shared__ u16 units[UNITS][EXPERTS];  // pairs of each unit, then of the units before
    int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, first = blockIdx.x * PAIRS;
    for (int i = thread; i < EXPERTS; i += THREADS) all[i] = before[i] = 0;
    for (int i = thread; i < UNITS * EXPERTS; i += THREADS) (&units[0][0])[i] = 0;
    if (blockIdx.x == 0)
        for (int i = thread; i < a.many; i += THREADS) a.zeros[i] = 0;
    __syncthreads();
#pragma unroll 4
    for (int pair = thread; pair < a.pairs; pair += THREADS) {
        int id = a.ids[pair];
        if (id >= 0) {
            atomicAdd(&all[id], 1u);
            if (pair < first) atomicAdd(&before[id], 1u);
        }
    }
    int ids[TURNS], ranks[TURNS];
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        int pair = first + turn * THREADS + thread;
        ids[turn] = pair < a.pairs ? (int)a.ids[pair] : -1;
        u32 same = __match_any_sync(ALL, ids[turn]);
        ranks[turn] = __popc(same & ((1u << lane) - 1));
        if (ids[turn] >= 0 && ranks[turn] == 0) units[turn * (THREADS / 32) + warp][ids[turn]] = __popc(same);
    }
    __syncthreads();
    for (int e = thread; e < EXPERTS; e += THREADS) {
        u32 sum = 0;
#pragma unroll
        for (int unit = 0; unit < UNITS; unit++) {
            u32 here = units[unit][e];
            units[unit][e] = sum, sum += here;
        }
    }
    if (warp == 0) {
        u32 sum = 0;
        for (int some = 0; some <= EXPERTS; some += 32) {
            int e = some + lane;
            u32 here = e < EXPERTS ? all[e] : 0, until = here;
#pragma unroll
            for (int apart = 1; apart < 32; apart *= 2) {
                u32 other = __shfl_up_sync(ALL, until, apart);
                if (lane >= apart) until += other;
            }
            if (e <= EXPERTS) starts[e] = sum + until - here;
            sum += __shfl_sync(ALL, until, 31);
        }
    }
    __syncthreads();
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
        int pair = first + turn * THREADS + thread, id = ids[turn], row = -1;
        if (id >= 0) {
            row = starts[id] + before[id] + units[turn * (THREADS / 32) + warp][id] + ranks[turn];
            a.sources[row] = pair;
        }
        if (pair < a.pairs) a.places[pair] = row;
    }
    if (blockIdx.x == 0)
        for (int e = thread; e <= EXPERTS; e += THREADS) a.starts[e] = starts[e];
}

// ---- tokens ----

extern __shared__ __align__(16) u16 values[];  // [D] bf16 of the token

__device__ __forceinline__ void prepare(const Arguments& a, long long token) {
    int thread = threadIdx.x, lane = thread % 32;
    u32 top = 0;
    for (int some = thread - lane; some < a.width / 8; some += THREADS) {  // 8 columns a thread, 32 four threads
        int column = (some + lane) * 8;
        bool live = column < a.width;
        uint4 eight = live ? *(const uint4*)(a.x + token * a.x_stride + column) : uint4{};
        u32* pairs = &eight.x;
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) most = max(most, max(pairs[i] << 16 & 0x7FFFFFFF, pairs[i] & 0x7FFF0000));
#if RAW
        most = max(most, __shfl_xor_sync(ALL, most, 1));
        most = max(most, __shfl_xor_sync(ALL, most, 2));
        u32 byte = scale_byte(most);
        float inverse = scale_inverse(byte), scale = scale_value(byte);
        most = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float low = __uint_as_float(pairs[i] << 16), high = __uint_as_float(pairs[i] & 0xFFFF0000);
            float2 value = e4m3_values(pair_e4m3(low * inverse, high * inverse));
            pairs[i] = pair_bf16(value.x * scale, value.y * scale);
            most = max(most, max(pairs[i] << 16 & 0x7FFFFFFF, pairs[i] & 0x7FFF0000));
        }
        if (live) *(uint4*)(a.grid + token * a.width + column) = eight;
#endif
#if CARRIED
        if (live) *(uint4*)(values + column) = eight;
        top = max(top, most);
#endif
    }
#if CARRIED
    __shared__ u32 tops[THREADS / 32];
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) top = max(top, __shfl_xor_sync(ALL, top, apart));
    if (lane == 0) tops[thread / 32] = top;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++) top = max(top, tops[warp]);
    u32 byte = scale_byte(top);
    if (thread == 0) a.scales[token] = scale_value(byte);
    float inverse = scale_inverse(byte);
    for (int place = thread * 16; place < a.width; place += THREADS * 16) {  // four columns of each group of a block
        const u16* from = values + (place & ~127) + (place >> 2 & 28);
        uint4 out;
#pragma unroll
        for (int group = 0; group < 4; group++) {
            uint2 four = *(const uint2*)(from + 32 * group);
            float2 low = {__uint_as_float(four.x << 16), __uint_as_float(four.x & 0xFFFF0000)};
            float2 high = {__uint_as_float(four.y << 16), __uint_as_float(four.y & 0xFFFF0000)};
            (&out.x)[group] =
                pair_e4m3(low.x * inverse, low.y * inverse) | pair_e4m3(high.x * inverse, high.y * inverse) << 16;
        }
        *(uint4*)(a.codes + token * a.width + place) = out;
    }
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS) place_rows(const __grid_constant__ Arguments a) {
    follow_kernel();
    let_next_kernel_start();
    if (blockIdx.x < a.placing)
        place(a);
    else
        prepare(a, blockIdx.x - a.placing);
}
