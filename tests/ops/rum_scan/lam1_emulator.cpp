// Runs the lam = 1 kernels on the CPU, one block at a time: every CUDA thread is a fiber of one OS thread.
//
// A warp runs as far as it can before the next one does, first to last or last to first, so that a missing barrier
// shows as a wrong number instead of a rare race. Shared memory starts as NaN.

#include <ucontext.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#define EMULATOR
#define __device__
#define __global__
#define __launch_bounds__(threads, blocks)

struct float4 {
    float x, y, z, w;
};

struct Barrier {
    int arrived = 0, generation = 0;
};
struct Warp {
    Barrier barrier;
    char exchange[2][32][8];
};
struct Fiber {
    ucontext_t context;
    bool done = false;
    int parity = 0;
    std::vector<char> stack;
};

static std::vector<Fiber> fibers;
static std::vector<Warp> warps;
static Barrier block_barrier;
static ucontext_t scheduler;
static int current, progress;
static float* emulated_shared;

static struct {
    struct {
        operator int() const { return current; }
    } x;
} threadIdx;
static struct {
    int x;
} blockIdx;

static void wait(Barrier& barrier, int count) {
    int generation = barrier.generation;
    if (++barrier.arrived == count) {
        barrier.arrived = 0, ++barrier.generation, ++progress;
        return;
    }
    while (barrier.generation == generation) swapcontext(&fibers[current].context, &scheduler);
}

static void __syncwarp() { wait(warps[current / 32].barrier, 32); }
static void __syncthreads() { wait(block_barrier, (int)fibers.size()); }

template <typename T>
static T __shfl_xor_sync(unsigned, T x, int mask) {
    Fiber& fiber = fibers[current];
    int parity = fiber.parity ^= 1, lane = current % 32;
    auto& exchange = warps[current / 32].exchange[parity];
    memcpy(exchange[lane], &x, sizeof(T));
    __syncwarp();
    memcpy(&x, exchange[lane ^ mask], sizeof(T));
    return x;
}

static float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static float rsqrtf(float x) { return 1.f / sqrtf(x); }
static float __fdividef(float x, float y) { return x / y; }
static float half_to_float(unsigned short bits) {
    _Float16 x;
    memcpy(&x, &bits, 2);
    return (float)x;
}
static unsigned short float_to_half(float x) {
    _Float16 y = (_Float16)x;
    unsigned short bits;
    memcpy(&bits, &y, 2);
    return bits;
}

#include "kernel.cu"

template <typename... A, size_t... I>
static void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*(A*)args[I]...);
}
template <typename... A>
static void call(void (*kernel)(A...), void** args) {
    call(kernel, args, std::index_sequence_for<A...>{});
}

static void** launch_args;

static void fiber_main() {
    call(KERNEL, launch_args);
    fibers[current].done = true, ++progress;
    swapcontext(&fibers[current].context, &scheduler);
}

static bool run_warp(int warp) {  // until nothing in it moves; whether anything did
    bool moved = false;
    for (int before = -1; before != progress;) {
        before = progress;
        for (int i = 32 * warp; i < 32 * warp + 32; ++i) {
            if (fibers[i].done) continue;
            current = i;
            swapcontext(&scheduler, &fibers[i].context);
        }
        moved |= before != progress;
    }
    return moved;
}

extern "C" int emulate(int blocks, int threads, int shared_bytes, void** args, int backwards) {
    launch_args = args;
    for (int block = 0; block < blocks; ++block) {
        blockIdx.x = block;
        std::vector<float4> shared(shared_bytes / 16 + 1);
        emulated_shared = (float*)shared.data();
        for (int i = 0; i < shared_bytes / 4; ++i) emulated_shared[i] = std::numeric_limits<float>::quiet_NaN();
        fibers = std::vector<Fiber>(threads);
        warps = std::vector<Warp>(threads / 32);
        block_barrier = Barrier();
        for (auto& fiber : fibers) {
            fiber.stack.resize(128 * 1024);
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.data();
            fiber.context.uc_stack.ss_size = fiber.stack.size();
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, fiber_main, 0);
        }
        bool moved = true;
        while (moved) {
            moved = false;
            for (int w = 0; w < (int)warps.size(); ++w) moved |= run_warp(backwards ? (int)warps.size() - 1 - w : w);
        }
        for (auto& fiber : fibers)
            if (!fiber.done) return 1;  // some threads wait at a barrier that others never reach
    }
    return 0;
}
