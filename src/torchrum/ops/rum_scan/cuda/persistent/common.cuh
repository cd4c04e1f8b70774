// What the persistent forward and backward kernels share: the layout, the exchange between blocks, the row sums.
//
// A group of GROUP blocks holds one batch tile of ROWS rows; block `cta` of it owns UNITS units, and keeps its slice
// of the recurrent weights in registers for the whole sequence. A block has four warpgroups. In the matmul
// warpgroup g takes a quarter of the inner axis; in the pointwise part it takes batch rows 8 g .. 8 g + 7 (if the
// tile has them), warp w of it units 8 w .. 8 w + 7, and lane (i, q) = (lane / 4, lane % 4) units 8 w + 2 q and
// 8 w + 2 q + 1 of row i. mma leaves its result the other way round: unit i of rows 2 q and 2 q + 1.
// The inner axis of a matmul comes in k-steps of 32 bytes: 16 numbers of 16 bits, or with WIDE 8 float32 numbers. Layouts
// are therefore the same in bytes. float32 is multiplied as TF32; TF32X3 takes three TF32 matmuls, which keep its digits.
//
// Blocks exchange data through global memory that is EMPTY_WORD before the launch and written once: a word
// that is not EMPTY_WORD has arrived, so reading the data is also the test for it. No word that is written is EMPTY_WORD: no
// conversion to 16 bits produces that NaN, and for a float32 number that has its bits another NaN is written.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#if WIDE
typedef float Element;
struct Pair {
    float low, high;
};
#define SIZE 4  // bytes a number
#else
typedef u16 Element;
typedef u32 Pair;
#define SIZE 2
#endif
#define K_STEP (32 / SIZE)  // the inner axis of one mma
#define ACCUMULATOR_SETS (TF32X3 ? 2 : 1)  // of accumulators: with TF32X3 the matmuls with a rest apart

#define ROWS (8 * NT)
#define UNITS 32
#define GROUP (NP / UNITS)
#ifdef FORWARD
#define STEPS (NP / (4 * K_STEP))  // k-steps a warp: the warpgroups split the inner axis in four
#else
#define STEPS (GATES * NP / (8 * K_STEP))  // in eight, two splits a warpgroup
#endif
#define EMPTY_WORD 0xFFFFFFFFu
#define SPINS (1 << 22)  // about two seconds of polling: a lost block ends in a trap, not in a hang
#define PREFETCH_STEPS 3  // steps between the prefetch of a line and its use
#define TINY 1e-24f      // squared length of a vector without a direction
#if WIDE
#define OPPOSITE 1e-8f   // |e + w|^2 of unit vectors e and w that have no plane to turn in
#define NARROW 0.2f      // |e + w|^2 below which 2 + 2 cos has lost digits, and the sum is taken over e + w itself
#else
#define OPPOSITE 4e-7f   // 1 + cos at which 16-bit dtypes cannot tell the plane of the rotation
#endif

struct Quad {
    u32 x, y, z, w;
};

#ifndef EMULATE
#define DEVICE __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define RARE __device__ __noinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(512, 1)
#define THREAD ((int)threadIdx.x)
#define BLOCK ((int)blockIdx.x)

extern __shared__ __align__(128) char shared_bytes[];
DEVICE char* shared_memory() { return shared_bytes; }
DEVICE void block_sync() {
    __syncwarp();  // polling parts the lanes, and a barrier wants whole warps
    __syncthreads();
}
DEVICE void warpgroup_sync(int g) {
    __syncwarp();
    asm volatile("bar.sync %0, 128;" ::"r"(g + 1) : "memory");
}
DEVICE void spin_once(int& spins) {
    if (++spins > SPINS) __trap();
}
// Whether all lanes have what they wait for. A warp polls as a whole: lanes that leave a loop one by one may take
// different copies of the code behind it, and barriers and matrix instructions count on whole warps.
DEVICE bool all_lanes(bool done) { return __all_sync(0xFFFFFFFFu, done); }
DEVICE bool any_lane(bool x) { return __any_sync(0xFFFFFFFFu, x); }
DEVICE float as_float(u32 x) { return __uint_as_float(x); }
DEVICE u32 as_bits(float x) { return __float_as_uint(x); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
DEVICE float fast_exp(float x) { return __expf(x); }
DEVICE float inverse_root(float x) { return rsqrtf(x); }
DEVICE void publish_word(u32* p, u32 x) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory"); }
DEVICE Quad peek(const u32* p) {
    Quad v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
DEVICE void clear_quad(u32* p) { asm volatile("st.global.v4.u32 [%0], {%1, %1, %1, %1};" ::"l"(p), "r"(EMPTY_WORD) : "memory"); }
DEVICE void fence() { __threadfence(); }
// Adds one to a counter of all blocks and says what it was; what the block has read and written comes before.
DEVICE u32 count_up(u32* p) {
    fence();
    const u32 before = atomicAdd(p, 1u);
    fence();
    return before;
}
// The mailboxes of a long sequence do not stay in the L2 until their step. A poll that misses takes a trip to memory, so
// the block that will write a line prefetches it some steps ahead.
DEVICE void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
// An 8 x 8 matrix of 16-bit numbers over a warp, two per lane: (row i, columns 2q, 2q + 1) becomes (column i,
// rows 2q, 2q + 1).
DEVICE u32 transpose(u32 x) {
    u32 y;
    __syncwarp();  // polling and rare branches part the lanes
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
#if WIDE
DEVICE void publish_words(u32* p, u32 x, u32 y) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(x), "r"(y) : "memory");
}
DEVICE u32 to_tf32(u32 x) {
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(__uint_as_float(x)));
    return y;
}
// The number itself; what is computed from it is not kept over all steps, for which there are no registers.
DEVICE u32 not_hoisted(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}
DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#elif HALF_BF16
#define HALF_NAME "bf16"
DEVICE float to_float(u16 x) { return __uint_as_float((u32)x << 16); }
DEVICE u32 pack(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
#else
#define HALF_NAME "f16"
DEVICE float to_float(u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}
DEVICE u32 pack(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
#endif
#if !WIDE
DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." HALF_NAME "." HALF_NAME
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
// Core matrices, 8 rows x 16 bytes: lane (i, q) gets row i, bytes 4q .. 4q + 3 of each. The four lie at 0, ROWS * 16,
// 128 and 128 + ROWS * 16 from `offset`. A lane keeps the address of the row that it hands to the instruction.
typedef u32 Cores;
DEVICE Cores cores_at(const char* p) {
    const int lane = THREAD & 31;
    __syncwarp();  // the matrix instructions want whole warps too
    return shared_address(p) + (lane & 7) * 16 + (lane & 8 ? ROWS * 16 : 0) + (lane & 16 ? 128 : 0);
}
DEVICE void load_cores4(u32 (&r)[4], Cores at, int offset) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at + offset) : "memory");
}
DEVICE void load_cores2(u32& r0, u32& r1, Cores at, int offset) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r0), "=r"(r1) : "r"(at + offset) : "memory");
}
#endif

// The same for float32, two per lane.
DEVICE void transpose(float& x0, float& x1) {
    const u32 b0 = as_bits(x0), b1 = as_bits(x1);
    const u32 low = transpose((b0 & 0xFFFF) | b1 << 16), high = transpose(b0 >> 16 | (b1 & 0xFFFF0000u));
    x0 = as_float((low & 0xFFFF) | high << 16);
    x1 = as_float(low >> 16 | (high & 0xFFFF0000u));
}
DEVICE bool arrived(const Quad& v) { return v.x != EMPTY_WORD && v.y != EMPTY_WORD && v.z != EMPTY_WORD && v.w != EMPTY_WORD; }
DEVICE void publish_float(float* p, float x) {
    u32 bits = as_bits(x);
    publish_word((u32*)p, bits == EMPTY_WORD ? 0x7FFFFFFFu : bits);
}

// How many of the units `unit` and `unit + 1` exist.
DEVICE int pair_count(int unit, int N) { return unit + 1 < N ? 2 : unit < N ? 1 : 0; }
// A pair of neighbouring numbers; what does not exist is zero. EVEN: N is even, so pairs are whole and aligned.
#if WIDE
DEVICE float to_float(float x) { return x; }
DEVICE Pair pack(float low, float high) { return {low, high}; }
DEVICE float low_of(Pair x) { return x.low; }
DEVICE float high_of(Pair x) { return x.high; }
DEVICE Pair load_pair(const float* at, int count) {
    if (count == 0) return {0.f, 0.f};
    if (EVEN) {
        const float2 x = *(const float2*)at;
        return {x.x, x.y};
    }
    return {at[0], count == 2 ? at[1] : 0.f};
}
DEVICE void store_pair(float* at, int count, Pair x) {
    if (count == 0) return;
    if (EVEN) {
        *(float2*)at = make_float2(x.low, x.high);
        return;
    }
    at[0] = x.low;
    if (count == 2) at[1] = x.high;
}
DEVICE u32 never_empty(u32 bits) { return bits == EMPTY_WORD ? 0x7FFFFFFFu : bits; }
DEVICE void publish_pair(u32* p, Pair x) { publish_words(p, never_empty(as_bits(x.low)), never_empty(as_bits(x.high))); }
#else
DEVICE float low_of(u32 x) { return to_float((u16)(x & 0xFFFF)); }
DEVICE float high_of(u32 x) { return to_float((u16)(x >> 16)); }
DEVICE u32 load_pair(const u16* at, int count) {
    if (count == 0) return 0;
    if (EVEN) return *(const u32*)at;
    return at[0] | (count == 2 ? (u32)at[1] << 16 : 0u);
}
DEVICE void store_pair(u16* at, int count, u32 x) {
    if (count == 0) return;
    if (EVEN) {
        *(u32*)at = x;
        return;
    }
    at[0] = (u16)x;
    if (count == 2) at[1] = (u16)(x >> 16);
}
DEVICE void publish_pair(u32* p, u32 x) { publish_word(p, x); }
#endif
DEVICE Pair sum_of(Pair x, Pair y) { return pack(low_of(x) + low_of(y), high_of(x) + high_of(y)); }
// Where a lane's pair lies among the words of an operand, [unit / (16 / SIZE)][row][16 bytes], of eight rows from `row`. A
// warp's pairs fill one line of 128 bytes, with WIDE two, of which lanes 0 and 2 hold the beginning.
DEVICE int word_of_pair(int eight, int row, int lane) {
    if (WIDE) return ((2 * eight + (lane >> 1 & 1)) * ROWS + row + (lane >> 2)) * 4 + 2 * (lane & 1);
    return (eight * ROWS + row) * 4 + lane;
}

// The gathered operand comes in stages of some k-steps, so that a stage travels while the one before is multiplied:
// [k / 8][row][k % 8] 16-bit or [k / 4][row][k % 4] float32 numbers, 16-byte pieces, PIECES per thread and stage.
// peek_stage asks for the pieces, finish_stage waits until each has arrived and puts it into shared memory.
#define STAGE_STEPS (WIDE && NT <= 2 ? 16 : 8)
#define PIECES (NT * STAGE_STEPS / 8)
#define STAGE_BYTES (STAGE_STEPS * 32 * ROWS)
#define STAGE_PIECES(left) ((left < STAGE_STEPS ? left : STAGE_STEPS) * 2 * ROWS)
#if WIDE && !TF32X3
DEVICE Quad as_operand(const Quad& v) { return {to_tf32(v.x), to_tf32(v.y), to_tf32(v.z), to_tf32(v.w)}; }
DEVICE u32 as_weight(float x) { return to_tf32(as_bits(x)); }
#else
DEVICE Quad as_operand(const Quad& v) { return v; }
DEVICE u32 as_weight(float x) { return as_bits(x); }
#endif
template <int STEPS_LEFT>
DEVICE void peek_stage(Quad (&v)[PIECES], const u32* from, int thread) {
#pragma unroll
    for (int j = 0; j < PIECES; j++)
        if (j * 128 + thread < STAGE_PIECES(STEPS_LEFT)) v[j] = peek(from + (j * 128 + thread) * 4);
}
template <int STEPS_LEFT>
DEVICE void finish_stage(Quad (&v)[PIECES], char* to, const u32* from, int thread) {
    int spins = 0;
    while (true) {
        bool all = true;
#pragma unroll
        for (int j = 0; j < PIECES; j++) all = all && (j * 128 + thread >= STAGE_PIECES(STEPS_LEFT) || arrived(v[j]));
        if (all_lanes(all)) break;
        spin_once(spins);
#pragma unroll
        for (int j = 0; j < PIECES; j++)
            if (j * 128 + thread < STAGE_PIECES(STEPS_LEFT) && !arrived(v[j])) v[j] = peek(from + (j * 128 + thread) * 4);
    }
#pragma unroll
    for (int j = 0; j < PIECES; j++)
        if (j * 128 + thread < STAGE_PIECES(STEPS_LEFT)) *(Quad*)(to + (j * 128 + thread) * 16) = as_operand(v[j]);
}

// A thread's weights for k-step s: in registers up to RESIDENT, the rest in shared memory before the compiler spills.
#define RESIDENT (STEPS < MAX_RESIDENT ? STEPS : MAX_RESIDENT)
#define EXTRA_BYTES ((STEPS - RESIDENT) * 512 * 16)
struct Fragment {
    u32 a[4];
};
struct Weights {
    Fragment resident[RESIDENT];
    Quad* extra;
    DEVICE_MEMBER void set(int s, const Fragment& f) {
        if (s < RESIDENT)
            resident[s < RESIDENT ? s : 0] = f;
        else
            extra[(s - RESIDENT) * 512 + THREAD] = {f.a[0], f.a[1], f.a[2], f.a[3]};
    }
    DEVICE_MEMBER Fragment get(int s) const {
        if (s < RESIDENT) return resident[s < RESIDENT ? s : 0];
        const Quad x = extra[(s - RESIDENT) * 512 + THREAD];
        return {{x.x, x.y, x.z, x.w}};
    }
};

// c[j] += weights x b. TF32X3: x = head + rest. mma cuts its operands to TF32's digits, so that x itself is the head; it
// cuts two digits off the rest too. heads x heads goes to c[j], heads x rests to c[NT + j]; rests x rests is left out.
#if TF32X3
DEVICE u32 rest_of(u32 x) { return as_bits(as_float(x) - as_float(x & 0xFFFFE000u)); }
struct Operand {
    u32 head[4], rest[4];
    DEVICE_MEMBER Operand(const u32 (&a)[4]) {
#pragma unroll
        for (int k = 0; k < 4; k++) head[k] = a[k], rest[k] = rest_of(not_hoisted(a[k]));
    }
};
DEVICE void multiply_add(float (&c)[ACCUMULATOR_SETS * NT][4], int j, const Operand& a, u32 b0, u32 b1) {
    mma(c[j], a.head, b0, b1);
    mma(c[NT + j], a.head, rest_of(b0), rest_of(b1));
    mma(c[NT + j], a.rest, b0, b1);
}
#else
typedef const u32 (&Operand)[4];
DEVICE void multiply_add(float (&c)[NT][4], int j, const u32 (&a)[4], u32 b0, u32 b1) { mma(c[j], a, b0, b1); }
#endif
// c[j] += a warp's 16 rows of weights x 8 rows of tile j, over the k-step of the gathered operand that lies at `offset`.
DEVICE void multiply_step(float (&c)[ACCUMULATOR_SETS * NT][4], const u32 (&weight)[4], Cores at, int offset) {
    Operand a(weight);
#pragma unroll
    for (int j = 0; j + 1 < NT; j += 2) {
        u32 b[4];
        load_cores4(b, at, offset + j * 128);
        multiply_add(c, j, a, b[0], b[1]);
        multiply_add(c, j + 1, a, b[2], b[3]);
    }
    if (NT % 2) {
        u32 b0, b1;
        load_cores2(b0, b1, at, offset + (NT - 1) * 128);
        multiply_add(c, NT - 1, a, b0, b1);
    }
}
DEVICE void clear(float (&c)[ACCUMULATOR_SETS * NT][4]) {
#pragma unroll
    for (int j = 0; j < ACCUMULATOR_SETS * NT; j++)
#pragma unroll
        for (int k = 0; k < 4; k++) c[j][k] = 0.f;
}
DEVICE void merge_accumulators(float (&c)[ACCUMULATOR_SETS * NT][4]) {
#if TF32X3
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int k = 0; k < 4; k++) c[j][k] += c[NT + j][k];
#endif
}

// Row sums over the group, four at a time. A board holds one step's packets of one group of eight rows:
// [block][row of 8][4] floats.
#define BOARD (GROUP * 32)
#define PASSES ((GROUP + 15) / 16)

// v[s]: this lane's share of sum s of its row. `part` is [4 warps][32] floats of shared memory.
DEVICE void publish_sums(float (&v)[4], float* part, float* board, int g, int cta, int thread) {
    const int lane = thread & 31;
    // Each exchange halves what a lane still adds up: lane (i, q) ends with sum q of row i.
#pragma unroll
    for (int s = 0; s < 2; s++) {
        float give = (lane & 2) ? v[s] : v[s + 2];
        v[s] = ((lane & 2) ? v[s + 2] : v[s]) + shuffle_xor(give, 2);
    }
    float give = (lane & 1) ? v[0] : v[1];
    part[thread] = ((lane & 1) ? v[1] : v[0]) + shuffle_xor(give, 1);
    warpgroup_sync(g);
    if (thread < 32) publish_float(board + cta * 32 + thread, part[thread] + part[32 + thread] + part[64 + thread] + part[96 + thread]);
}

DEVICE void peek_sums(Quad (&v)[PASSES], const float* board, int thread) {
#pragma unroll
    for (int j = 0; j < PASSES; j++)
        if (j * 128 + thread < GROUP * 8) v[j] = peek((const u32*)board + (j * 128 + thread) * 4);
}

// Waits for what peek_sums has not seen yet, adds up, and leaves each warp's part in `total`, [4 warps][8 rows][4].
DEVICE void add_sums(Quad (&v)[PASSES], float* total, const float* board, int thread) {
    int lane = thread & 31, spins = 0;
    float s[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int j = 0; j < PASSES; j++) {
        const bool mine = j * 128 + thread < GROUP * 8;
        while (!all_lanes(!mine || arrived(v[j]))) {
            spin_once(spins);
            if (mine) v[j] = peek((const u32*)board + (j * 128 + thread) * 4);
        }
        if (mine) s[0] += as_float(v[j].x), s[1] += as_float(v[j].y), s[2] += as_float(v[j].z), s[3] += as_float(v[j].w);
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
        float give = (lane & 16) ? s[k] : s[k + 2];
        s[k] = ((lane & 16) ? s[k + 2] : s[k]) + shuffle_xor(give, 16);
    }
    float give = (lane & 8) ? s[0] : s[1];
    s[0] = ((lane & 8) ? s[1] : s[0]) + shuffle_xor(give, 8);
    total[(thread & 96) + (lane & 7) * 4 + (lane >> 3)] = s[0];
}

// The four sums of row `row` of eight, after a barrier that follows add_sums.
DEVICE void read_sums(float (&s)[4], const float* total, int row) {
    const float4* warps = (const float4*)total + row;
    float4 sum = warps[0];
#pragma unroll
    for (int w = 1; w < 4; w++) {
        float4 x = warps[w * 8];
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
    }
    s[0] = sum.x, s[1] = sum.y, s[2] = sum.z, s[3] = sum.w;
}

// Mailboxes that are not filled for each launch are left EMPTY_WORD by the last block of a group that has read all of a
// tile's; only this block gets true. The counter starts at EMPTY_WORD, and goes back to it.
RARE bool is_last_reader(u32* arrivals) {
    u32* before = (u32*)shared_memory();
    block_sync();
    if (THREAD == 0) *before = count_up(arrivals);
    block_sync();
    const bool last = *before == EMPTY_WORD + (u32)(GROUP - 1);
    if (last && THREAD == 0) *arrivals = EMPTY_WORD;
    return last;
}
// Clears one tile's part of a mailbox (steps, tiles, words).
RARE void clear_mailboxes(u32* mailbox, int steps, int words, int tiles, int tile) {
    for (int n = THREAD * 4; n < steps * words; n += 512 * 4)
        clear_quad(mailbox + (i64)(n / words * tiles + tile) * words + n % words);
}
