// What the kernels of this folder share: types, instructions, numbers.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// ---- instructions ----

__device__ __forceinline__ u32 address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }

__device__ __forceinline__ void begin_barrier(u32 bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

__device__ __forceinline__ void wait(u32 bar, u32 phase) {
    asm volatile(
        "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra.uni again;\n}" ::"r"(bar),
        "r"(phase)
        : "memory");
}

__device__ __forceinline__ void arrive(u32 bar, bool really) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];\n}" ::"r"(bar),
        "r"((int)really)
        : "memory");
}

__device__ __forceinline__ void expect(u32 bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_bulk(u32 to, const u8* from, int bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
}

// Which program of its cluster this is.
__device__ __forceinline__ u32 member() {
    u32 number;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(number));
    return number;
}

// Where another program of the cluster has what is at this shared address.
__device__ __forceinline__ u32 address_there(u32 at, u32 member) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(member));
    return there;
}

__device__ __forceinline__ void arrive_there(u32 bar, u32 member, bool really) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];\n}" ::"r"(
            address_there(bar, member)),
        "r"((int)really)
        : "memory");
}

// To the same place of another program of the cluster, whose barrier counts the bytes.
__device__ __forceinline__ void pass_bulk(u32 at, int bytes, u32 bar, u32 member) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     address_there(at, member)),
                 "r"(at), "r"(bytes), "r"(address_there(bar, member))
                 : "memory");
}

__device__ __forceinline__ void meet_team() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void copy_chunk(u32 to, const u8* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// All but the last PENDING groups of this thread's copies are done, and matrix instructions may read them.
template <int PENDING>
__device__ __forceinline__ void show_copies() {
    asm volatile("cp.async.wait_group %0;\nfence.proxy.async.shared::cta;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void open_group() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void close_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wait_groups() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void meet(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ __forceinline__ int acquire(const int* at) {
    int value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ int add_both_ways(int* at) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(at) : "memory");
    return before;
}

// One more, for whoever acquires it: what this thread's warpgroup has written is there.
__device__ __forceinline__ void release(int* at) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(at) : "memory");
}

__device__ __forceinline__ float load_from_programs(const float* at) {
    float value;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ void follow_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void let_next_kernel_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ int thread_number() {  // asked for anew, so that nobody keeps it
    int number;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(number));
    return number;
}

// The same for all threads of a warp, and known so to the compiler.
__device__ __forceinline__ int of_warp(int number) { return __shfl_sync(0xFFFFFFFF, number, 0); }

// ---- numbers ----

constexpr u32 NAN_BITS = 0x7FC00000;

__device__ __forceinline__ u32 bits(float x) { return __float_as_uint(x); }

__device__ __forceinline__ u32 pair_bf16(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float as_bf16(float x) { return __uint_as_float(pair_bf16(x, 0.f) << 16); }

__device__ __forceinline__ u32 times_bf16(u32 a, u32 b) {
    u32 product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

__device__ __forceinline__ u32 pair_e4m3(float low, float high) {  // beyond 448 it is 448; NaN stays one
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float2 e4m3_values(u32 pair) {
    u32 half;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half) : "h"((u16)pair));
    float2 values;
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
        : "=f"(values.x), "=f"(values.y)
        : "r"(half));
    return values;
}

// UE8M0 byte of the scale that brings a group of this largest magnitude within 448; 255 where that is no number.
__device__ __forceinline__ u32 scale_byte(u32 top) {
    u32 least = max(top, 0x38D1B717u);  // 1e-4
    return top < 0x7F800000u ? ((least + 0x1FFFFF) >> 23) - 8 : 255;
}

__device__ __forceinline__ float scale_value(u32 byte) {
    return __uint_as_float(byte == 0 ? 0x00400000 : byte == 255 ? NAN_BITS : byte << 23);
}

__device__ __forceinline__ float scale_inverse(u32 byte) {
    return __uint_as_float(byte == 255 ? NAN_BITS : (254 - byte) << 23);
}

__device__ __forceinline__ float least_of(float a, float b) {
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

__device__ __forceinline__ float largest_of(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// silu(min(gate, limit)) * clamp(up, -limit, limit), as `triton/swiglu.py` has it, instruction by instruction.
__device__ __forceinline__ float gated(float gate, float up, float limit) {
    if (limit > 0.f) {
        gate = least_of(gate, limit);
        up = least_of(largest_of(up, -limit), limit);
    }
    float x = least_of(largest_of(0.f - gate, -104.f), 89.f), power, silu;
    float whole = fmaxf(floorf(__fmaf_rn(x, 1.4426950408889634f, 0.5f)), -127.f);
    float rest = __fmaf_rn(whole, -1.428606765330187e-06f, __fmaf_rn(whole, -0.693145751953125f, x));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(__fmul_rn(rest, 1.4426950408889634f)));
    float scale = __uint_as_float((u32)((int)whole + 127) << 23);
    asm("div.full.f32 %0, %1, %2;" : "=f"(silu) : "f"(gate), "f"(__fmaf_rn(power, scale, 1.f)));
    return __fmul_rn(silu, up);
}
