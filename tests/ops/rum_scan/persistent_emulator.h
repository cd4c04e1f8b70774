// Runs a persistent kernel on the CPU: every thread of every block is a coroutine, a barrier or an empty poll yields.
// Defines what common.cuh leaves to the device; the matmuls, transposes and shuffles follow PTX's layouts.
#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define EMULATE 1
#define DEVICE static inline
#define DEVICE_MEMBER inline
#define RARE static inline
#define KERNEL static void

namespace emulator {
struct Barrier {
    int arrived = 0, generation = 0;
};
struct Block {
    std::vector<char> shared;
    Barrier all, group[4], warp[16];
    unsigned exchange[16][32][8];
};
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    int block, thread;
    bool done = false;
    Barrier* waits = nullptr;
    int generation = 0;
};
static std::vector<Block> blocks;
static std::vector<Fiber> fibers;
static Fiber* now;
static ucontext_t scheduler;
static void (*body)();  // no std::function: its header takes longer to compile than a kernel

static void yield() { swapcontext(&now->context, &scheduler); }
static void wait(Barrier& b, int count) {
    if (++b.arrived == count) {
        b.arrived = 0, b.generation++;
        return;
    }
    now->waits = &b, now->generation = b.generation;
    yield();
}
static Block& block() { return blocks[now->block]; }
static void enter() {
    body();
    now->done = true;
    yield();
}
static unsigned state = 12345;
static int run(int grid, size_t shared, void (*kernel)()) {
    body = kernel;
    blocks.assign(grid, Block());
    for (auto& b : blocks) b.shared.assign(shared, (char)0xFF);
    fibers = std::vector<Fiber>(grid * 512);
    for (int f = 0; f < (int)fibers.size(); f++) {
        Fiber& x = fibers[f];
        x.block = f / 512, x.thread = f % 512, x.stack.resize(32768);
        getcontext(&x.context);
        x.context.uc_stack.ss_sp = x.stack.data(), x.context.uc_stack.ss_size = x.stack.size(), x.context.uc_link = nullptr;
        makecontext(&x.context, enter, 0);
    }
    long idle = 0;
    while (true) {
        bool left = false, moved = false;
        // Warps in an order that changes: a missing barrier should show.
        state = state * 1664525u + 1013904223u;
        int warps = (int)fibers.size() / 32, start = state % warps, step = (state >> 8) % 2 ? 1 : warps - 1;
        for (int n = 0, warp = start; n < warps; n++, warp = (warp + step) % warps)
            for (int lane = 0; lane < 32; lane++) {
                Fiber& x = fibers[warp * 32 + lane];
                if (x.done) continue;
                left = true;
                if (x.waits && x.waits->generation == x.generation) continue;
                x.waits = nullptr, moved = true, now = &x;
                swapcontext(&scheduler, &x.context);
            }
        if (!left) return 0;
        if (!moved && ++idle > 3) return 1;  // everyone stands at a barrier that nobody completes
    }
}
static unsigned* slot(int lane) { return block().exchange[now->thread / 32][lane]; }
static void warp_sync() { wait(block().warp[now->thread / 32], 32); }
}  // namespace emulator

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define THREAD (emulator::now->thread)
#define BLOCK (emulator::now->block)
static char* shared_memory() { return emulator::block().shared.data(); }
static void block_sync() { emulator::wait(emulator::block().all, 512); }
static void warpgroup_sync(int g) { emulator::wait(emulator::block().group[g], 128); }
static void spin_once(int& spins) {
    if (++spins > 20000) fprintf(stderr, "block %d thread %d waits for a word that never comes\n", BLOCK, THREAD), abort();
    emulator::yield();
}
static bool all_lanes(bool done) { return done; }  // each thread polls for itself here
static bool any_lane(bool x) {
    emulator::slot(THREAD % 32)[0] = x;
    emulator::warp_sync();
    bool any = false;
    for (int lane = 0; lane < 32; lane++) any = any || emulator::slot(lane)[0];
    emulator::warp_sync();
    return any;
}
static float as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static unsigned as_bits(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
static float shuffle_xor(float x, int mask) {
    int lane = THREAD % 32;
    emulator::slot(lane)[0] = as_bits(x);
    emulator::warp_sync();
    float y = as_float(emulator::slot(lane ^ mask)[0]);
    emulator::warp_sync();
    return y;
}
static long long clock64() { return 0; }
static float fast_exp(float x) { return std::exp(x); }
static float inverse_root(float x) { return 1.f / std::sqrt(x); }
static void publish_word(unsigned* p, unsigned x) {
    if (*p != 0xFFFFFFFFu || x == 0xFFFFFFFFu) fprintf(stderr, "a word is written twice or empty\n"), abort();
    *p = x;
}
static void publish_words(unsigned* p, unsigned x, unsigned y) { publish_word(p, x), publish_word(p + 1, y); }
static void clear_quad(unsigned* p) { p[0] = p[1] = p[2] = p[3] = 0xFFFFFFFFu; }
static void fence() {}
static unsigned count_up(unsigned* p) { return (*p)++; }
static void prefetch_line(const void* p) {}
struct Quad;
template <class Q = Quad>
static Q peek(const unsigned* p) { return Q{p[0], p[1], p[2], p[3]}; }
static unsigned transpose(unsigned x) {
    int lane = THREAD % 32, i = lane / 4, q = lane % 4;
    emulator::slot(lane)[0] = x;
    emulator::warp_sync();
    unsigned low = emulator::slot(2 * q * 4 + i / 2)[0] >> (i % 2 * 16) & 0xFFFF;
    unsigned high = emulator::slot((2 * q + 1) * 4 + i / 2)[0] >> (i % 2 * 16) & 0xFFFF;
    emulator::warp_sync();
    return low | high << 16;
}
// Puts a lane's operands where the whole warp can read them.
static void show_operands(const unsigned (&a)[4], unsigned b0, unsigned b1) {
    unsigned* mine = emulator::slot(THREAD % 32);
    for (int k = 0; k < 4; k++) mine[k] = a[k];
    mine[4] = b0, mine[5] = b1;
    emulator::warp_sync();
}
#if WIDE
static unsigned to_tf32(unsigned x) {  // to nearest, ties away from zero
    if (as_float(x) != as_float(x)) return 0x7FFFFFFF;
    return (x & 0x7F800000u) == 0x7F800000u ? x : (x + 0x1000u) & ~0x1FFFu;
}
static unsigned not_hoisted(unsigned x) { return x; }
// The device cuts its operands to TF32's digits, aligns the products and the accumulator to the
// largest of them, and drops what lies below its last bit.
static void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    int lane = THREAD % 32, i = lane / 4, q = lane % 4;
    show_operands(a, b0, b1);
    auto tf32 = [](unsigned x) { return (double)as_float(x & ~0x1FFFu); };
    for (int n = 0; n < 4; n++) {
        int row = i + n / 2 * 8, column = 2 * q + n % 2;
        double terms[9] = {c[n]}, largest = std::fabs(c[n]), sum = 0;
        for (int k = 0; k < 8; k++) {
            double x = tf32(emulator::slot(row % 8 * 4 + k % 4)[row / 8 + k / 4 * 2]);
            terms[k + 1] = x * tf32(emulator::slot(column * 4 + k % 4)[4 + k / 4]);
            largest = std::fmax(largest, std::fabs(terms[k + 1]));
        }
        double unit = largest > 0 ? std::ldexp(1.0, std::ilogb(largest) - 24) : 1.0;
        for (double term : terms) sum += std::isfinite(term) ? std::trunc(term / unit) * unit : term;
        float nearest = (float)sum;
        c[n] = std::fabs(nearest) > std::fabs(sum) ? std::nextafter(nearest, 0.f) : nearest;
    }
    emulator::warp_sync();
}
#elif HALF_BF16
static float to_float(unsigned short x) { return as_float((unsigned)x << 16); }
static unsigned to_half(float x) {
    if (x != x) return 0x7FFF;
    unsigned b = as_bits(x);
    return (b + 0x7FFF + (b >> 16 & 1)) >> 16;
}
#else
static float to_float(unsigned short x) { _Float16 y; memcpy(&y, &x, 2); return (float)y; }
static unsigned to_half(float x) {
    if (x != x) return 0x7FFF;
    _Float16 y = (_Float16)x;
    unsigned short b;
    memcpy(&b, &y, 2);
    return b;
}
#endif
#if !WIDE
static unsigned pack(float low, float high) { return to_half(low) | to_half(high) << 16; }
static void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    int lane = THREAD % 32, i = lane / 4, q = lane % 4;
    show_operands(a, b0, b1);
    auto half = [](unsigned x, int k) { return to_float((unsigned short)(x >> (k % 2 * 16))); };
    for (int n = 0; n < 4; n++) {
        int row = i + n / 2 * 8, column = 2 * q + n % 2;
        for (int k = 0; k < 16; k++) {
            unsigned x = emulator::slot(row % 8 * 4 + k % 8 / 2)[row / 8 + k / 8 * 2];
            unsigned y = emulator::slot(column * 4 + k % 8 / 2)[4 + k / 8];
            c[n] += half(x, k) * half(y, k);
        }
    }
    emulator::warp_sync();
}
#endif
typedef const char* Cores;
static Cores cores_at(const char* p) { return p; }
static unsigned core_word(const char* m) { unsigned x; memcpy(&x, m + THREAD % 32 * 4, 4); return x; }
static void load_cores2(unsigned& r0, unsigned& r1, Cores at, int offset) {
    r0 = core_word(at + offset), r1 = core_word(at + offset + 8 * NT * 16);
}
static void load_cores4(unsigned (&r)[4], Cores at, int offset) {
    load_cores2(r[0], r[1], at, offset);
    load_cores2(r[2], r[3], at, offset + 128);
}
