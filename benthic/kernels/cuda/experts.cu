// The routed experts of a layer on SM90: rows of pairs, both products and what lies between them, in two launches.
//
//   place_rows      each pair's place among the rows, sorted by expert; tokens on the FP8 grid, against one scale
//   stream_experts  gate and up rows, clamped SwiGLU times the routing weight, FP8 grid; second product
//
// Weights are in the order of `moe_experts_pack.py` and are unpacked in registers, where the matrix instruction wants
// them. A block is 128 columns of K. A piece is HEIGHT weight rows, one tile of at most MOST rows of one expert, and all
// of K. Each program takes an equal run of blocks, so that all end together; a piece that two programs share is summed
// by both, one after the other: the program with its first blocks does them before anything else and leaves its sums,
// the other does the rest last and begins with them. So every sum runs along K in one order, wherever it is cut.
//
// A program is WARPGROUPS that multiply and one that copies: one thread asks for weights in bulk, COPIERS gather rows.
// The second product begins where the first one's rows are complete, tile by tile; weights run ahead over that border.
// With TEAM 2, two programs, a cluster, do a piece of 2 * HEIGHT weight rows together: each gathers half of the rows and
// passes them to the other, so that half as much is read.
//
// Set when compiled: CARRIED 0 or 1, TEAM, WARPGROUPS, PARTS (64 weight rows each, of a warpgroup), STAGES, WIDTHS of
// instructions from the widest on, which is MOST, FLOOR (rows of a tile below which it costs the same), EXPERTS,
// SHARED_BYTES, MULTIPLYING_REGISTERS and COPYING_REGISTERS of a thread.
// `mma<N>(sums, a, b, add)`, the matrix instruction for N rows, stands before this text.
//
// R rows, T tokens, k slots, E experts, D hidden width, I expert width.

#include "common.cuh"

constexpr int HEIGHT = 64 * WARPGROUPS * PARTS;  // weight rows of a program
constexpr int WIDE = HEIGHT * TEAM;              // of a piece
constexpr int MULTIPLIERS = 128 * WARPGROUPS;
constexpr int COPIERS = 96;
constexpr int AHEAD = STAGES < 6 ? 1 : 3;        // blocks whose rows a thread asks for before it waits for the first
constexpr int ROW_BYTES = CARRIED ? 128 : 256;   // of a row in a block
constexpr int CHUNKS = ROW_BYTES / 16;
constexpr int ROWS_BYTES = MOST * ROW_BYTES;
constexpr int WORDS_BYTES = HEIGHT * 64;
constexpr int SCALES_BYTES = HEIGHT * 4;
constexpr int CHUNK = MOST <= 32 ? 16 : 32;      // rows of a tile that are finished together
constexpr int BLOCK_ROWS = 128;                  // weight rows that lie together

// ---- what there is to do ----

struct Matrix {
    const u8* words;
    const u8* scales;
    const float* base;  // [E, N]
    int rows;           // N
    int blocks;         // K / 128
};

struct Arguments {
    Matrix first, second;
    const u8* x;            // [T, D] bf16, or E4M3 in the order of `columns`
    long long x_stride;     // bytes
    const float* x_scales;  // [T], of E4M3
    const int* starts;      // [E + 1] first row of each expert
    const int* pairs;       // [R] pair of each row
    const float* weights;   // [T * k]
    const u64* tables;      // [24]
    u8* hidden;             // [R, I] on the FP8 grid: bf16, or its codes
    u8* hidden_scales;      // [R, I / 32], of codes
    u8* carried;            // [R, I] against one scale a row, in the order of `columns`
    float* carried_scales;  // [R]
    u16* y;                 // [R, D] bf16
    float* sums;            // [2, programs, WARPGROUPS, PARTS * MOST / 2, 128] what a program leaves for the next one
    int* left;              // [2, programs, WARPGROUPS] whether it did, zero at first
    int* complete;          // [tiles] warpgroups that finished a piece of the first product, zero at first
    float limit;
    int round;  // activations to bf16 before they are quantised
    int slots;  // k
};

// Of a program.
struct Shared {
    u8 rows[STAGES][ROWS_BYTES];
    u8 words[STAGES][WORDS_BYTES];
    u8 scales[STAGES][SCALES_BYTES];
    u64 full[STAGES], empty[STAGES];
    u64 table[24];
    u8 turns[MULTIPLIERS / 32][512];         // a warp's own
    u32 tops[WARPGROUPS][2][CHUNK][4];       // largest magnitudes of a row, warp by warp
    float2 factors[WARPGROUPS][MOST];        // weights and scales of a tile's rows
    u32 sources[MOST];                       // where the rows of a tile come from
    int last[WARPGROUPS];                    // whether it finished the last piece of a tile
    // tiles of the experts: those of an expert have the same height, but for the last one
    int starts[EXPERTS + 1];                 // first row
    u32 tiles[EXPERTS + 1];                  // tiles of the experts before
    u32 costs[EXPERTS + 1];                  // what those cost
};
static_assert(sizeof(Shared) <= SHARED_BYTES, "what the host has asked for is too little");

extern __shared__ __align__(1024) u8 room[];

__device__ __forceinline__ Shared& shared() { return *(Shared*)room; }

struct Piece {
    int expert, column, tile, row, rows;
};

struct Segment {
    int piece, from, to;  // blocks of K
};

__device__ __forceinline__ int tiles_of(int rows) { return (rows + MOST - 1) / MOST; }

__device__ __forceinline__ int tile_height(int rows, int tiles) { return ((rows + tiles - 1) / tiles + 7) & ~7; }

__device__ __forceinline__ int cost_of(int rows, int tiles) {
    return tiles ? tiles * max(tile_height(rows, tiles), FLOOR) / 8 : 0;
}

// The last expert with prefix[e] <= value: one that has tiles.
__device__ __forceinline__ int find(const u32 (&prefix)[EXPERTS + 1], u32 value) {
    int low = 0, high = EXPERTS;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (prefix[middle] <= value)
            low = middle;
        else
            high = middle;
    }
    return low;
}

__device__ __forceinline__ Piece piece_of(int number, int columns) {
    const Shared& s = shared();
    Piece piece;
    piece.expert = find(s.tiles, number / columns);
    int first = s.tiles[piece.expert], tiles = s.tiles[piece.expert + 1] - first;
    int inside = number - first * columns, start = s.starts[piece.expert], end = s.starts[piece.expert + 1];
    piece.column = inside / tiles;  // tiles of an expert stream the same weights one after the other
    int tile = inside - piece.column * tiles, height = tile_height(end - start, tiles);
    piece.tile = first + tile;
    piece.row = start + tile * height;
    piece.rows = min(height, end - piece.row);
    return piece;
}

// A team's equal share: from block `head_block` of piece `head` up to block `tail_block` of piece `tail`.
struct Run {
    int head, head_block, tail, tail_block, blocks;

    // Where the number-th of so many runs begins.
    __device__ __forceinline__ void begin(u32 number, u32 runs, int columns, int& piece, int& block) {
        const Shared& s = shared();
        u32 all = s.costs[EXPERTS], each = columns * blocks;
        u32 cost = all * number / runs, inside = all * number % runs * each / runs;  // of all * each * number / runs
        if (cost >= all) {
            piece = s.tiles[EXPERTS] * columns, block = 0;
            return;
        }
        int e = find(s.costs, cost);
        u32 tiles = s.tiles[e + 1] - s.tiles[e], a_tile = (s.costs[e + 1] - s.costs[e]) / tiles;
        u32 unit = ((cost - s.costs[e]) * each + inside) / a_tile;
        piece = s.tiles[e] * columns + unit / blocks, block = unit % blocks;
    }

    __device__ __forceinline__ Run(const Matrix& matrix) : blocks(matrix.blocks) {
        u32 number = blockIdx.x / TEAM, runs = gridDim.x / TEAM;
        begin(number, runs, matrix.rows / WIDE, head, head_block);
        begin(number + 1, runs, matrix.rows / WIDE, tail, tail_block);
    }

    // The number-th segment of the run, false when there are no more: first what the next program waits for, at last
    // what waits for the program before.
    __device__ __forceinline__ bool segment(int number, Segment& found) const {
        if (tail_block > 0) {
            found = {tail, tail == head ? head_block : 0, tail_block};
            if (number == 0) return true;
            if (tail == head) return false;
            number--;
        }
        int whole = head + (head_block > 0), count = tail - whole;
        if (number < count) {
            found = {whole + number, 0, blocks};
            return true;
        }
        found = {head, head_block, blocks};
        return head_block > 0 && tail > head && number == count;
    }
};

// Where a thread is in the ring.
struct Place {
    int stage;
    u32 phase;

    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

__device__ __forceinline__ const Matrix& matrix_of(const Arguments& a, int product) {
    return product ? a.second : a.first;
}

// A warp is done with a stage, in the eyes of all members.
__device__ __forceinline__ void leave(u32 bar, bool really) {
    arrive(bar, really);
    if (TEAM > 1) arrive_there(bar, member() ^ 1, really);
}

// ---- copies ----

// Rows of a tile that a member of the team gathers: where they begin, and how many.
__device__ __forceinline__ void rows_of(u32 member, int rows, int& first, int& count) {
    int half = TEAM == 1 ? rows : (rows + 15) / 16 * 8;  // whole lines of eight
    first = member ? min(half, rows) : 0;
    count = member ? rows - first : min(half, rows);
}

__device__ __forceinline__ void copy_weights(const Arguments& a) {
    Shared& s = shared();
    Place at = {0, 1};
#pragma unroll 1
    for (int product = 0; product < 2; product++) {
        const Matrix& matrix = matrix_of(a, product);
        Run run(matrix);
        Segment segment;
#pragma unroll 1
        for (int number = 0; run.segment(number, segment); number++) {
            Piece piece = piece_of(segment.piece, matrix.rows / WIDE);
            u64 first = (u64)piece.expert * (matrix.rows / BLOCK_ROWS) +
                        (piece.column * TEAM + member()) * (HEIGHT / BLOCK_ROWS);
            int passed, passed_rows = 0;
            if (TEAM > 1) rows_of(member() ^ 1, piece.rows, passed, passed_rows);
#pragma unroll 1
            for (int k = segment.from; k < segment.to; k++, at.next()) {
                u32 bar = address(&s.full[at.stage]);
                wait(address(&s.empty[at.stage]), at.phase);
                expect(bar, WORDS_BYTES + SCALES_BYTES + passed_rows * ROW_BYTES);
#pragma unroll
                for (int part = 0; part < HEIGHT / BLOCK_ROWS; part++) {
                    u64 block = (first + part) * matrix.blocks + k;
                    copy_bulk(address(s.words[at.stage]) + part * 8192, matrix.words + block * 8192, 8192, bar);
                    copy_bulk(address(s.scales[at.stage]) + part * 512, matrix.scales + block * 512, 512, bar);
                }
            }
        }
    }
}

// A block of gathered rows is in shared memory: passes it to the other member, and says so.
__device__ __forceinline__ void give_rows(int first, int count, Place& done, int thread) {
    Shared& s = shared();
    u32 bar = address(&s.full[done.stage]);
    if (TEAM > 1) {
        meet(1, COPIERS);
        if (thread == 0 && count > 0)
#pragma unroll
            for (int half = 0; half < ROW_BYTES / 128; half++)
                pass_bulk(address(s.rows[done.stage]) + half * (MOST * 128) + first * 128, count * 128, bar, member() ^ 1);
    }
    arrive(bar, true);
    done.next();
}

// Rows of tiles, in the order that matrix instructions read them: 128 bytes a row, chunks of 16 exchanged by row % 8.
__device__ __forceinline__ void copy_rows(const Arguments& a) {
    Shared& s = shared();
    int thread = thread_number() - MULTIPLIERS - 32, chunk = thread % CHUNKS;
    u32 inside = chunk / 8 * (MOST * 128);
    Place at = {0, 1}, done = {0, 0};
#pragma unroll 1
    for (int product = 0; product < 2; product++) {
        const Matrix& matrix = matrix_of(a, product);
        const u8* x = (product ? (CARRIED ? a.carried : a.hidden) : a.x) + chunk * 16;
        long long stride = product ? (long long)matrix.blocks * ROW_BYTES : a.x_stride;
        Run run(matrix);
        Segment segment;
#pragma unroll 1
        for (int number = 0; run.segment(number, segment); number++) {
            Piece piece = piece_of(segment.piece, matrix.rows / WIDE);
            if (product && thread == 0)
                while (acquire(a.complete + piece.tile) < a.first.rows / HEIGHT * WARPGROUPS + CARRIED);
            int first, count;
            rows_of(member(), piece.rows, first, count);
            for (int i = thread; i < count; i += COPIERS)
                s.sources[i] = product ? piece.row + first + i : a.pairs[piece.row + first + i] / a.slots;
            meet(1, COPIERS);
            int pending = 0;
#pragma unroll 1
            for (int k = segment.from; k < segment.to; k++, at.next()) {
                u32 to = address(s.rows[at.stage]) + inside + first * 128;
                wait(address(&s.empty[at.stage]), at.phase);
#pragma unroll 1
                for (int row = thread / CHUNKS; row < count; row += COPIERS / CHUNKS)
                    copy_chunk(to + row * 128 + (((chunk ^ row) & 7) << 4), x + s.sources[row] * stride + k * ROW_BYTES);
                close_copies();
                if (pending == AHEAD) {
                    show_copies<AHEAD>();
                    give_rows(first, count, done, thread);
                } else {
                    pending++;
                }
            }
            show_copies<0>();  // all, since what is waited for next may need them
            for (; pending > 0; pending--) give_rows(first, count, done, thread);
            meet(1, COPIERS);
        }
    }
}

// ---- products ----

struct Thread {
    int group, warp, lane, line, quarter;  // warpgroup; in it the warp; lane / 4 and lane % 4
};

// Of a part's 64 weight rows a thread has sums of two, 16 * warp + line and 8 more, each for N / 4 rows of the tile:
// sum[4 * (i / 2) + i % 2] and sum[4 * (i / 2) + 2 + i % 2] are those for this row.
__device__ __forceinline__ int row_of(int i, const Thread& me) { return 8 * (i / 2) + 2 * me.quarter + i % 2; }

__device__ __forceinline__ uint4 load_words(u32 at) {
    uint4 w;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "r"(at));
    return w;
}

__device__ __forceinline__ u32 load_word(u32 at) {
    u32 w;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(w) : "r"(at));
    return w;
}

__device__ __forceinline__ u32 load_byte(u32 at) {
    u32 w;
    asm volatile("ld.shared.u8 %0, [%1];" : "=r"(w) : "r"(at));
    return w;
}

__device__ __forceinline__ void store_byte(u32 at, u32 byte) {
    asm volatile("st.shared.u8 [%0], %1;" ::"r"(at), "r"(byte) : "memory");
}

__device__ __forceinline__ uint2 load_pair(u32 at) {
    uint2 w;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(w.x), "=r"(w.y) : "r"(at));
    return w;
}

#if CARRIED
typedef uint2 Scales;  // the group's table

__device__ __forceinline__ Scales load_scales(u32 at, const Thread& me) {
    return load_pair(address(shared().table) + 8 * load_byte(at + me.quarter));
}

// Words of a row, 16 of its codes -> E4M3 of the places 64 * half and on.
__device__ __forceinline__ void unpack(u32 a, u32 b, Scales table, int, u32 (&out)[4]) {
    u32 m = a & 0x77777777, n = b & 0x77777777;
    out[0] = __byte_perm(table.x, table.y, m) | (a & 0x80808080);
    out[1] = __byte_perm(table.x, table.y, m >> 16) | ((a << 4) & 0x80808080);
    out[2] = __byte_perm(table.x, table.y, n) | (b & 0x80808080);
    out[3] = __byte_perm(table.x, table.y, n >> 16) | ((b << 4) & 0x80808080);
}
#else
typedef u32 Scales;  // of the row's four groups

__device__ __forceinline__ Scales load_scales(u32 at, const Thread&) { return load_word(at); }

// Words of a row, 16 of its codes -> bf16 pairs of the columns 64 * half and on, each times 2^-126 over its group's scale.
__device__ __forceinline__ void unpack(u32 a, u32 b, Scales scales, int half, u32 (&out)[8]) {
    u32 unit = __byte_perm(scales, 0, 0x4040 + 0x0101 * 2 * half) << 7;
    u32 other = __byte_perm(scales, 0, 0x4141 + 0x0101 * 2 * half) << 7;
    u32 rest;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(rest) : "r"(a), "r"(b << 2), "n"(REST));  // a where REST has bits
    out[0] = times_bf16(a & KEPT, unit);
    out[1] = times_bf16(__funnelshift_l(a, a, TURN_1) & KEPT, unit);
    out[2] = times_bf16((a << TURN_2) & KEPT, unit);
    out[3] = times_bf16(b & KEPT, unit);
    out[4] = times_bf16(__funnelshift_l(b, b, TURN_1) & KEPT, other);
    out[5] = times_bf16((b << TURN_2) & KEPT, other);
    out[6] = times_bf16(__funnelshift_l(rest, rest, REST_TURN_0) & KEPT, other);
    out[7] = times_bf16((rest << REST_TURN_1) & KEPT, other);
}
#endif

// Sums stay in the registers they are in, before this and after.
template <int COUNT>
__device__ __forceinline__ void hold(float* sum) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(sum[i])::"memory");
}

// A matrix of rows in shared memory, as the instruction is told: 128-byte rows with chunks exchanged, 8 rows 1024 bytes.
__device__ __forceinline__ u64 matrix_at(u32 at) { return (1ull << 62) | (64ull << 32) | (1ull << 16) | (at >> 4); }

// Adds `blocks` blocks of a warpgroup's weight rows to `sum`, at least one.
template <int N>
__device__ __forceinline__ void multiply(
    float (&sum)[PARTS][MOST / 2], int blocks, Place& at, const Thread& me) {
    Shared& s = shared();
    int row = me.group * PARTS * 64 + me.warp * 16 + me.line;
    u32 before = 0;
    u32 a[2][CARRIED ? 8 : 16];
#if CARRIED
    float acc[PARTS][MOST / 2];
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll
        for (int i = 0; i < N / 2; i++) acc[part][i] = 0.f;
#endif
    int k = 0;
    do {  // no `for`: sums that the instruction has in hand do not meet others where the loop begins
        wait(address(&s.full[at.stage]), at.phase);
        u32 words = address(s.words[at.stage]) + row * 64 + me.quarter * 16;
        u32 scales = address(s.scales[at.stage]) + row * 4;
        u64 rows = matrix_at(address(s.rows[at.stage]));
        uint4 low, high;
        Scales low_scales, high_scales;
#pragma unroll
        for (int step = 0; step < 2 * PARTS; step++) {
            int part = step / 2, half = step % 2;
            if (half == 0) {
                low = load_words(words + part * 4096), high = load_words(words + part * 4096 + 512);
                low_scales = load_scales(scales + part * 256, me), high_scales = load_scales(scales + part * 256 + 32, me);
            }
            u32 lines[2][CARRIED ? 4 : 8];
            unpack(half ? low.z : low.x, half ? low.w : low.y, low_scales, half, lines[0]);
            unpack(half ? high.z : high.x, half ? high.w : high.y, high_scales, half, lines[1]);
            u32 (&to)[CARRIED ? 8 : 16] = a[half];
#pragma unroll
            for (int i = 0; i < (CARRIED ? 8 : 16); i++) to[i] = lines[i & 1][i >> 1];
#if CARRIED
            if (half == 0) {  // FP8 sums keep few bits: they move to float32 block by block
                wait_groups<0>();
                hold<N / 2>(acc[part]);
#pragma unroll
                for (int i = 0; i < N / 2; i++) sum[part][i] += acc[part][i];
                if (part == 0) leave(before, k > 0 && me.lane == 0);
            }
            open_group();
            mma<N>(acc[part], to, rows + 4 * half, half);
            mma<N>(acc[part], to + 4, rows + 4 * half + 2, 1);
            close_group();
            if (half == 1) wait_groups<1>();
#else
            hold<N / 2>(sum[part]);
            open_group();
#pragma unroll
            for (int i = 0; i < 4; i++) mma<N>(sum[part], to + 4 * i, rows + half * (MOST * 8) + 2 * i, 1);
            close_group();
            // with several parts the compiler wants nothing in hand where the loop begins again
            if (PARTS > 1 && step == 2 * PARTS - 1)
                wait_groups<0>();
            else
                wait_groups<1>();
            if (PARTS == 1 && step == 0) leave(before, k > 0 && me.lane == 0);
#endif
        }
        before = address(&s.empty[at.stage]);
        if (!CARRIED && PARTS > 1) leave(before, me.lane == 0);
        at.next();
    } while (++k < blocks);
    wait_groups<0>();
    if (CARRIED || PARTS == 1) leave(before, me.lane == 0);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
#if CARRIED
        hold<N / 2>(acc[part]);
#pragma unroll
        for (int i = 0; i < N / 2; i++) sum[part][i] += acc[part][i];
#else
        hold<N / 2>(sum[part]);
#endif
    }
}

// ---- what is done with sums ----

// Sums of a part for CHUNK rows of the tile, from the first-th 16 on.
__device__ __forceinline__ void take(const float (&sum)[MOST / 2], int first, float (&v)[CHUNK / 2]) {
#pragma unroll
    for (int sixteen = 0; sixteen < MOST / 16; sixteen += CHUNK / 16)
        if (sixteen == first)
#pragma unroll
            for (int i = 0; i < CHUNK / 2; i++) v[i] = sixteen * 8 + i < MOST / 2 ? sum[sixteen * 8 + i] : 0.f;
}

__device__ __forceinline__ void store_rows(float (&v)[CHUNK / 2], const Arguments& a, const Piece& piece, int line,
                                           int first, float low, float high, const Thread& me) {
#pragma unroll
    for (int i = 0; i < CHUNK / 4; i++) {
        float* two = v + 4 * (i / 2) + i % 2;
        two[0] *= low, two[2] *= high;
#if CARRIED
        float scale = shared().factors[me.group][first + row_of(i, me)].y;
        two[0] *= scale, two[2] *= scale;
#endif
    }
    u32 turn_room = address(shared().turns[me.group * 4 + me.warp]);
    u32 to = turn_room + (me.lane & 7) * 32 + ((me.lane >> 3) & 1) * 16 + (me.lane >> 4) * 256;
#pragma unroll
    for (int i = 0; i < CHUNK / 2; i += 8) {
        __syncwarp();
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                     "r"(pair_bf16(v[i], v[i + 1])), "r"(pair_bf16(v[i + 2], v[i + 3])),
                     "r"(pair_bf16(v[i + 4], v[i + 5])), "r"(pair_bf16(v[i + 6], v[i + 7]))
                     : "memory");
        __syncwarp();
        int row = first + 2 * i + me.lane / 2;
        u16* y = a.y + (u64)(piece.row + row) * a.second.rows + line + me.warp * 16 + (me.lane & 1) * 8;
        if (row < piece.rows) *(uint4*)y = load_words(turn_room + me.lane * 16);
    }
}

// Gate and up rows, which alternate by 8 -> clamped SwiGLU times the pair's weight, on the FP8 grid: 32 channels.
__device__ __forceinline__ void store_hidden(float (&v)[CHUNK / 2], const Arguments& a, const Piece& piece, int line,
                                             int first, float low, float high, u32 (*tops)[4], const Thread& me) {
    u32 turn_room = address(shared().turns[me.group * 4 + me.warp]);
    int inner = a.first.rows / 2;
#pragma unroll
    for (int i = 0; i < CHUNK / 4; i++) {
        float* two = v + 4 * (i / 2) + i % 2;
        float2 factors = shared().factors[me.group][first + row_of(i, me)];
        float gate = two[0] * low, up = two[2] * high;
#if CARRIED
        gate *= factors.y, up *= factors.y;
#endif
        float y = __fmul_rn(gated(as_bf16(gate), as_bf16(up), a.limit), factors.x);
        two[0] = a.round ? as_bf16(y) : y;
        u32 top = bits(two[0]) & 0x7FFFFFFF;
#pragma unroll
        for (int apart = 4; apart < 32; apart *= 2) top = max(top, __shfl_xor_sync(0xFFFFFFFF, top, apart));
        if (me.line == 0) tops[row_of(i, me)][me.warp] = top;
    }
    meet(2 + me.group, 128);
#pragma unroll
    for (int i = 0; i < CHUNK / 2; i += 8) {
        u32 pairs[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            u32 byte[2];
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                int row = row_of(i / 2 + 2 * j + odd, me);
                uint4 top = *(const uint4*)tops[row];
                byte[odd] = scale_byte(max(max(top.x, top.y), max(top.z, top.w)));
#if CARRIED
                if (me.warp == 0 && me.line == 0 && first + row < piece.rows)
                    a.hidden_scales[(u64)(piece.row + first + row) * (inner / 32) + line / 64] = byte[odd];
#endif
            }
            float* two = v + i + 4 * j;
            pairs[j] = pair_e4m3(two[0] * scale_inverse(byte[0]), two[1] * scale_inverse(byte[1]));
#if !CARRIED
            float2 value = e4m3_values(pairs[j]);
            pairs[j] = pair_bf16(value.x * scale_value(byte[0]), value.y * scale_value(byte[1]));
#endif
        }
        int row = first + 2 * i + me.lane;  // of 16, one a thread: 8 channels
        bool mine = me.lane < 16 && row < piece.rows;
        u64 at = (u64)(piece.row + row) * inner + line / 2 + me.warp * 8;
        __syncwarp();
#if CARRIED
#pragma unroll
        for (int j = 0; j < 4; j++)
            store_byte(turn_room + row_of(j, me) * 8 + me.line, pairs[j / 2] >> 8 * (j % 2));
        __syncwarp();
        if (mine) *(uint2*)(a.hidden + at) = load_pair(turn_room + me.lane * 8);
#else
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(
                         turn_room + (me.lane & 15) * 16),
                     "r"(pairs[0]), "r"(pairs[1])
                     : "memory");
        __syncwarp();
        if (mine) *(uint4*)(a.hidden + 2 * at) = load_words(turn_room + me.lane * 16);
#endif
    }
}

#if CARRIED
// A tile's rows of hidden, codes with a scale for 32 -> codes against one scale a row, in the order of `columns`.
__device__ __forceinline__ void carry_rows(const Arguments& a, const Piece& piece, const Thread& me) {
    int inner = a.first.rows / 2;
    for (int i = me.warp; i < piece.rows; i += 4) {
        u64 row = piece.row + i;
        const u8 *codes = a.hidden + row * inner, *scales = a.hidden_scales + row * (inner / 32);
        u32 top = 0;
        for (int c = me.lane * 8; c < inner; c += 256) {
            uint2 eight = __ldcg((const uint2*)(codes + c));
            u32 most = __vmaxu4(eight.x & 0x7F7F7F7F, eight.y & 0x7F7F7F7F);
            most = max(max(most & 255, most >> 8 & 255), max(most >> 16 & 255, most >> 24));
            top = max(top, bits(e4m3_values(most).x * scale_value(__ldcg(scales + c / 32))));
        }
#pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) top = max(top, __shfl_xor_sync(0xFFFFFFFF, top, apart));
        u32 byte = scale_byte(top);
        if (me.lane == 0) a.carried_scales[row] = scale_value(byte);
        float inverse = scale_inverse(byte);
        for (int c = me.lane * 8; c < inner; c += 256) {
            uint2 eight = __ldcg((const uint2*)(codes + c));
            float factor = scale_value(__ldcg(scales + c / 32)) * inverse;
            u8* to = a.carried + row * inner + (c & ~127) + (c >> 2 & 7) * 16 + (c >> 5 & 3) * 4;
#pragma unroll
            for (int word = 0; word < 2; word++) {
                u32 four = word ? eight.y : eight.x;
                float2 low = e4m3_values(four & 0xFFFF), high = e4m3_values(four >> 16);
                u32 out = pair_e4m3(low.x * factor, low.y * factor) | pair_e4m3(high.x * factor, high.y * factor) << 16;
                *(u32*)(to + 16 * word) = out;
            }
        }
    }
}
#endif

// A warpgroup is done with its part of a piece of the first product. The last one of a tile carries its rows.
__device__ __forceinline__ void complete_piece(const Arguments& a, const Piece& piece, const Thread& me) {
    int* last = &shared().last[me.group];
    bool one = me.warp == 0 && me.lane == 0;
    meet(2 + me.group, 128);
#if CARRIED
    if (one) *last = add_both_ways(a.complete + piece.tile) == a.first.rows / HEIGHT * WARPGROUPS - 1;
    meet(2 + me.group, 128);
    if (*last) {
        carry_rows(a, piece, me);
        meet(2 + me.group, 128);
        if (one) release(a.complete + piece.tile);
    }
#else
    if (one) release(a.complete + piece.tile);
#endif
}

// Multiplies with the narrowest instruction that has a tile's rows; widths from the widest on.
template <int N>
__device__ __forceinline__ void multiply_rows(int, float (&sum)[PARTS][MOST / 2], int blocks, Place& at, const Thread& me) {
    multiply<N>(sum, blocks, at, me);
}

template <int N, int NEXT, int... LATER>
__device__ __forceinline__ void multiply_rows(int rows, float (&sum)[PARTS][MOST / 2], int blocks, Place& at,
                                              const Thread& me) {
    if (rows > NEXT)
        multiply<N>(sum, blocks, at, me);
    else
        multiply_rows<NEXT, LATER...>(rows, sum, blocks, at, me);
}

__device__ __forceinline__ void do_segment(const Arguments& a, int product, const Segment& segment,
                                           const Piece& piece, Place& at, const Thread& me) {
    constexpr int TURNS = (MOST + 127) / 128;  // in which a warpgroup goes over the rows
    const Matrix& matrix = matrix_of(a, product);
    float sum[PARTS][MOST / 2];
    int thread = me.warp * 32 + me.lane;
    bool ends = segment.to == matrix.blocks;
    int pairs[TURNS];
    if (ends && product == 0)
#pragma unroll
        for (int i = 0; i < TURNS; i++)
            pairs[i] = thread + i * 128 < piece.rows ? a.pairs[piece.row + thread + i * 128] : 0;
    u64 mine = (u64)(product * gridDim.x + blockIdx.x) * WARPGROUPS + me.group;
    if (segment.from > 0) {
        u64 from = mine - TEAM * WARPGROUPS;
        if (thread == 0)
            while (!acquire(a.left + from));
        meet(2 + me.group, 128);
        const float* left = a.sums + from * (PARTS * MOST / 2 * 128) + thread;
#pragma unroll
        for (int i = 0; i < PARTS * MOST / 2; i++) {
            sum[i / (MOST / 2)][i % (MOST / 2)] = 0.f;
            if (i % (MOST / 2) / 8 * 16 < piece.rows)
                sum[i / (MOST / 2)][i % (MOST / 2)] = load_from_programs(left + i * 128);
        }
    } else {
#pragma unroll
        for (int i = 0; i < PARTS * MOST / 2; i++) sum[i / (MOST / 2)][i % (MOST / 2)] = 0.f;
    }
    multiply_rows<WIDTHS>(piece.rows, sum, segment.to - segment.from, at, me);
    if (!ends) {
        float* left = a.sums + mine * (PARTS * MOST / 2 * 128) + thread;
#pragma unroll
        for (int i = 0; i < PARTS * MOST / 2; i++)
            if (i % (MOST / 2) / 8 * 16 < piece.rows) left[i * 128] = sum[i / (MOST / 2)][i % (MOST / 2)];
        meet(2 + me.group, 128);
        if (thread == 0) release(a.left + mine);
        return;
    }
    int line = piece.column * WIDE + (member() * WARPGROUPS + me.group) * PARTS * 64;
    const float* base = matrix.base + (u64)piece.expert * matrix.rows + line + me.warp * 16 + me.line;
    float low[PARTS], high[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; part++) low[part] = base[part * 64], high[part] = base[part * 64 + 8];
    if (CARRIED || product == 0) {
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            int row = thread + i * 128;
            float2 factors = {0.f, 0.f};
            if (row < piece.rows) {
                if (product == 0) factors.x = a.weights[pairs[i]];
#if CARRIED
                factors.y = product ? load_from_programs(a.carried_scales + piece.row + row)
                                    : a.x_scales[pairs[i] / a.slots];
#endif
            }
            if (row < MOST) shared().factors[me.group][row] = factors;
        }
        meet(2 + me.group, 128);
    }
    int turn = 0;
#pragma unroll
    for (int part = 0; part < PARTS; part++)
#pragma unroll 1
        for (int first = 0; first < piece.rows; first += CHUNK, turn ^= 1) {
            float v[CHUNK / 2];
            take(sum[part], first / 16, v);
            if (product)
                store_rows(v, a, piece, line + 64 * part, first, low[part], high[part], me);
            else
                store_hidden(v, a, piece, line + 64 * part, first, low[part], high[part],
                             shared().tops[me.group][turn], me);
        }
    if (product == 0) complete_piece(a, piece, me);
    meet(2 + me.group, 128);  // the factors have been read
}

// ---- the kernel ----

extern "C" __global__ void
#if TEAM > 1
__cluster_dims__(TEAM, 1, 1)
#endif
__launch_bounds__(MULTIPLIERS + 128, 1) stream_experts(const __grid_constant__ Arguments a) {
    Shared& s = shared();
    int warp = of_warp(threadIdx.x / 32), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            begin_barrier(address(&s.full[stage]), 1 + COPIERS);
            begin_barrier(address(&s.empty[stage]), TEAM * MULTIPLIERS / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (TEAM > 1) meet_team();
    if (CARRIED && threadIdx.x < 24) s.table[threadIdx.x] = a.tables[threadIdx.x];
    follow_kernel();
    let_next_kernel_start();
    for (int e = threadIdx.x; e <= EXPERTS; e += MULTIPLIERS + 128) s.starts[e] = a.starts[e];
    __syncthreads();
    if (warp == 0) {
        u32 tile = 0, cost = 0;
#pragma unroll 1
        for (int first = 0; first <= EXPERTS; first += 32) {
            int e = first + lane, rows = e < EXPERTS ? s.starts[e + 1] - s.starts[e] : 0;
            u32 mine = tiles_of(rows), price = cost_of(rows, mine), tiles = mine, costs = price;
#pragma unroll
            for (int apart = 1; apart < 32; apart *= 2) {
                u32 t = __shfl_up_sync(0xFFFFFFFF, tiles, apart), c = __shfl_up_sync(0xFFFFFFFF, costs, apart);
                if (lane >= apart) tiles += t, costs += c;
            }
            if (e <= EXPERTS) s.tiles[e] = tile + tiles - mine, s.costs[e] = cost + costs - price;
            tile += __shfl_sync(0xFFFFFFFF, tiles, 31), cost += __shfl_sync(0xFFFFFFFF, costs, 31);
        }
    }
    __syncthreads();

    if (warp >= MULTIPLIERS / 32) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COPYING_REGISTERS));
        if (warp > MULTIPLIERS / 32)
            copy_rows(a);
        else if (thread_number() == MULTIPLIERS)
            copy_weights(a);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLYING_REGISTERS));
        int thread = thread_number(), number = of_warp(thread / 32);
        Thread me = {number / 4, number % 4, thread % 32, thread % 32 / 4, thread % 4};
        Place at = {0, 0};
#pragma unroll 1
        for (int product = 0; product < 2; product++) {
            const Matrix& matrix = matrix_of(a, product);
            Run run(matrix);
            Segment segment;
#pragma unroll 1
            for (int i = 0; run.segment(i, segment); i++) {
                Piece piece = piece_of(segment.piece, matrix.rows / WIDE);
                do_segment(a, product, segment, piece, at, me);
            }
        }
    }
    if (TEAM > 1) meet_team();  // until then the other one may write here
}
