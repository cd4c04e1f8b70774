// Shared by the lam = 1 kernels: one block works on one batch row for the whole sequence.
//
// Matrices (N x N) live in registers. A thread holds RP consecutive rows and every eighth column group of one, so a
// matmul with a vector is FMAs, a few wide broadcast loads and a reduction over 8 lanes. Vectors (N) live in shared
// memory. What is between two matmuls is vector arithmetic that every warp repeats for itself, VL elements per lane:
// that saves block barriers, of which a step has two.
//
// Settings come as macros: N, RP (2 or 4), GATES (1 or 2), LN (0 none, 1 before, 2 authors), ACT (1 relu, 2 tanh,
// 3 sigmoid, 4 softsign), ETA (0/1), ZONE (0 none, 1 mask, 2 mean), DTYPE (0 float, 1 bf16, 2 fp16),
// EVERY (steps between checkpoints of R), SHARED_FLOATS. The file is also compiled as plain C++ for the tests, under EMULATOR.

typedef long long i64;
typedef unsigned int u32;

#ifdef EMULATOR
#define SHARED_MEMORY(name) float* name = emulated_shared
#define UNROLL
#else
#define SHARED_MEMORY(name) extern __shared__ __align__(16) float name[]
#define UNROLL _Pragma("unroll")
__device__ inline float half_to_float(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
__device__ inline unsigned short float_to_half(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
#endif

constexpr int INPUTS = GATES + 1;
// Floats from one step's raw gates to the next row's. In float32 they stand in grad_xp, where the backward reads a step's
// gates and then writes their gradients; 16-bit dtypes have no space for them there.
constexpr int GATE_STRIDE = (DTYPE ? GATES : INPUTS) * N;
constexpr int SEGMENTS = 8;  // lanes that share a row
constexpr int WARP_ROWS = 32 / SEGMENTS * RP;
constexpr int WARPS = (N + WARP_ROWS - 1) / WARP_ROWS;
constexpr int THREADS = 32 * WARPS;
constexpr int REGISTERS = 65536 / THREADS < 255 ? 65536 / THREADS : 255;  // of a thread
constexpr int VL = (N + 31) / 32;  // vector elements per lane: lane, lane + 32, ...
constexpr int NV = 32 * VL;  // length of a vector in shared memory, zero past N
// a thread's columns: 4 in each full group of 32, then single ones 8 apart
constexpr int FULL = N / 32 + (N % 32 > 24);
constexpr int TAIL = N > 32 * FULL ? (N - 32 * FULL + 7) / 8 : 0;
constexpr int CHUNKS = FULL + (TAIL > 0);
constexpr int COLUMNS = 4 * FULL + TAIL;
constexpr float TINY = 1e-24f;  // |x|^2 up to which a vector has no direction
constexpr float OPPOSITE = 1e-8f;  // |e + w|^2 of unit vectors up to which they count as opposite

__device__ inline float load(const float* p, i64 i) { return p[i]; }
__device__ inline void store(float* p, i64 i, float x) { p[i] = x; }

#if DTYPE == 0
typedef float io_t;
__device__ inline float rounded(float x) { return x; }
#else
typedef unsigned short io_t;
#if DTYPE == 1
__device__ inline float from_bits(io_t bits) { return __uint_as_float((u32)bits << 16); }
__device__ inline io_t to_bits(float x) {
    u32 bits = __float_as_uint(x);
    return x != x ? 0x7fc0 : (io_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
#else
__device__ inline float from_bits(io_t bits) { return half_to_float(bits); }
__device__ inline io_t to_bits(float x) { return float_to_half(x); }
#endif
__device__ inline float load(const io_t* p, i64 i) { return from_bits(p[i]); }
__device__ inline void store(io_t* p, i64 i, float x) { p[i] = to_bits(x); }
__device__ inline float rounded(float x) { return from_bits(to_bits(x)); }
#endif
// Number i of a row of xp, which may not have its bias yet; null where it has.
__device__ inline float with_bias(float x, const float* bias, int i) { return bias ? x + bias[i] : x; }

// ---- matrices -------------------------------------------------------------------------------------------------

struct ThreadPosition {  // where a thread stands in its block
    int tid, warp, lane, segment;
    int row;  // first of its RP rows
    int own;  // the row whose sum it holds after reduce_rows
    bool owner;  // one thread for each row
};

__device__ inline ThreadPosition thread_position() {
    ThreadPosition p;
    p.tid = threadIdx.x;
    p.warp = p.tid / 32;
    p.lane = p.tid % 32;
    p.segment = p.lane % SEGMENTS;
    p.row = p.warp * WARP_ROWS + p.lane / SEGMENTS * RP;
    p.own = p.row + p.segment * RP / SEGMENTS;
    p.owner = p.segment % (SEGMENTS / RP) == 0;
    return p;
}

__device__ inline constexpr int chunk_width(int k) { return k < FULL ? 4 : TAIL; }
__device__ inline int column(int c, int segment) {
    return c < 4 * FULL ? 32 * (c / 4) + 4 * segment + c % 4 : 32 * FULL + 8 * (c - 4 * FULL) + segment;
}

struct Chunk {
    float x[4];
};

__device__ inline Chunk chunk(const float* vector, int k, int segment) {
    Chunk c;
    if (k < FULL) {
        float4 q = *(const float4*)(vector + 32 * k + 4 * segment);
        c.x[0] = q.x, c.x[1] = q.y, c.x[2] = q.z, c.x[3] = q.w;
    } else {
        UNROLL for (int n = 0; n < TAIL; ++n) c.x[n] = vector[32 * FULL + 8 * n + segment];
    }
    return c;
}

struct Rows {
    float x[RP];
};

__device__ inline Rows rows(const float* vector, int row) {
    Rows r;
    if (RP == 4) {
        float4 q = *(const float4*)(vector + row);
        r.x[0] = q.x, r.x[1] = q.y, r.x[2 % RP] = q.z, r.x[3 % RP] = q.w;
    } else {
        UNROLL for (int i = 0; i < RP; ++i) r.x[i] = vector[row + i];
    }
    return r;
}

struct Tile {
    float v[RP][COLUMNS];
};

// element (i, j) at matrix[i * row_stride + j * column_stride]
__device__ inline void load_tile(Tile& tile, const float* matrix, int row_stride, int column_stride, const ThreadPosition& p) {
    UNROLL for (int r = 0; r < RP; ++r) UNROLL for (int c = 0; c < COLUMNS; ++c) {
        int i = p.row + r, j = column(c, p.segment);
        tile.v[r][c] = i < N && j < N ? matrix[i * row_stride + j * column_stride] : 0.f;
    }
}

__device__ inline void identity_tile(Tile& tile, const ThreadPosition& p) {
    UNROLL for (int r = 0; r < RP; ++r) UNROLL for (int c = 0; c < COLUMNS; ++c) {
        int i = p.row + r;
        tile.v[r][c] = i < N && i == column(c, p.segment) ? 1.f : 0.f;
    }
}

__device__ inline void zero_tile(Tile& tile) {
    UNROLL for (int r = 0; r < RP; ++r) UNROLL for (int c = 0; c < COLUMNS; ++c) tile.v[r][c] = 0.f;
}

__device__ inline void store_tile(const Tile& tile, float* matrix, const ThreadPosition& p) {
    UNROLL for (int r = 0; r < RP; ++r) UNROLL for (int c = 0; c < COLUMNS; ++c) {
        int i = p.row + r, j = column(c, p.segment);
        if (i < N && j < N) matrix[i * N + j] = tile.v[r][c];
    }
}

__device__ inline void multiply(Rows& sum, const Tile& tile, int k, const Chunk& c) {
    UNROLL for (int r = 0; r < RP; ++r) UNROLL for (int n = 0; n < 4; ++n) {
        if (n < chunk_width(k)) sum.x[r] += tile.v[r][4 * k + n] * c.x[n];
    }
}

// tile += a x^T + b y^T
__device__ inline void add_outer(Tile& tile, const Rows& a, const float* x, const Rows& b, const float* y, int segment) {
    UNROLL for (int k = 0; k < CHUNKS; ++k) {
        Chunk cx = chunk(x, k, segment), cy = chunk(y, k, segment);
        UNROLL for (int r = 0; r < RP; ++r) UNROLL for (int n = 0; n < 4; ++n) {
            if (n >= chunk_width(k)) continue;
            tile.v[r][4 * k + n] += a.x[r] * cx.x[n];  // two FMAs; as one sum it would be three instructions
            tile.v[r][4 * k + n] += b.x[r] * cy.x[n];
        }
    }
}

__device__ inline float shuffle(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// Partial sums of RP rows in 8 lanes -> the whole sum of row Place::own; the halves are exchanged, not copied.
__device__ inline float reduce_rows(const Rows& sum, int segment) {
    float x;
    if (RP == 4) {
        bool high = segment & 4, odd = segment & 2;
        float keep0 = high ? sum.x[2 % RP] : sum.x[0], give0 = high ? sum.x[0] : sum.x[2 % RP];
        float keep1 = high ? sum.x[3 % RP] : sum.x[1], give1 = high ? sum.x[1] : sum.x[3 % RP];
        keep0 += shuffle(give0, 4);
        keep1 += shuffle(give1, 4);
        x = odd ? keep1 : keep0;
        x += shuffle(odd ? keep0 : keep1, 2);
    } else {
        bool high = segment & 4;
        x = high ? sum.x[1] : sum.x[0];
        x += shuffle(high ? sum.x[0] : sum.x[1], 4);
        x += shuffle(x, 2);
    }
    return x + shuffle(x, 1);
}

// ---- vectors, VL elements per lane, zero past N --------------------------------------------------------------------

#define EACH(i) UNROLL for (int i = 0; i < VL; ++i)

struct Vector {
    float x[VL];
};

__device__ inline bool inside(int i, int lane) { return 32 * i + 32 <= N || 32 * i + lane < N; }

__device__ inline Vector read(const float* vector, int lane) {
    Vector v;
    EACH(i) v.x[i] = vector[32 * i + lane];
    return v;
}

__device__ inline void write(float* vector, const Vector& v, int lane) { EACH(i) vector[32 * i + lane] = v.x[i]; }

template <typename T>
__device__ inline void write_global(T* p, i64 offset, const Vector& v, int lane) {
    EACH(i) if (inside(i, lane)) store(p, offset + 32 * i + lane, v.x[i]);
}

__device__ inline float inner(const Vector& a, const Vector& b) {  // this lane's part
    float sum = 0.f;
    EACH(i) sum += a.x[i] * b.x[i];
    return sum;
}

template <int K>
__device__ inline void warp_sum(float (&x)[K]) {
    UNROLL for (int mask = 16; mask > 0; mask /= 2) UNROLL for (int k = 0; k < K; ++k) x[k] += shuffle(x[k], mask);
}

__device__ inline float warp_sum(float x) {
    float sum[1] = {x};
    warp_sum(sum);
    return sum[0];
}

__device__ inline Vector scaled(const Vector& v, float factor) {
    Vector out;
    EACH(i) out.x[i] = v.x[i] * factor;
    return out;
}

// 1/sqrt(x) to a rounding: the fast instruction and one Newton step, without the branches of sqrtf and a division
__device__ inline float inverse_root(float x) {
    float y = rsqrtf(x);
    return y + 0.5f * y * (1.f - x * y * y);
}

// 1/|x| from |x|^2; 0 where the vector has no direction
__device__ inline float inverse_length(float squares) { return squares <= TINY ? 0.f : inverse_root(squares); }

__device__ inline float sigmoid(float x) { return __fdividef(1.f, 1.f + expf(-x)); }

template <int KIND>
__device__ inline float activate(float x) {
    if (KIND == 1) return x > 0.f ? x : (x != x ? x : 0.f);
    if (KIND == 2) return tanhf(x);
    if (KIND == 3) return sigmoid(x);
    if (KIND == 4) return __fdividef(x, 1.f + fabsf(x));
    return x;
}

template <int KIND>
__device__ inline float slope(float x, float y) {  // dy/dx at y = activate(x)
    if (KIND == 1) return x > 0.f ? 1.f : 0.f;
    if (KIND == 2) return 1.f - y * y;
    if (KIND == 3) return y * (1.f - y);
    if (KIND == 4) {
        float d = __fdividef(1.f, 1.f + fabsf(x));
        return d * d;
    }
    return 1.f;
}

struct Normed {  // layer norm without its scale and shift
    Vector hat;
    float rstd;
};

__device__ inline Normed normalise(const Vector& v, float ln_eps, int lane) {
    float sum = 0.f, square = 0.f;
    EACH(i) sum += v.x[i];
    float mean = warp_sum(sum) * (1.f / N);
    Normed n;
    EACH(i) {
        n.hat.x[i] = inside(i, lane) ? v.x[i] - mean : 0.f;
        square += n.hat.x[i] * n.hat.x[i];
    }
    n.rstd = inverse_root(warp_sum(square) * (1.f / N) + ln_eps);
    n.hat = scaled(n.hat, n.rstd);
    return n;
}

// ln: this norm's weight, then its bias, each NV long
__device__ inline Vector affine(const Vector& hat, const float* ln, int lane) {
    Vector out;
    EACH(i) out.x[i] = ln[32 * i + lane] * hat.x[i] + ln[NV + 32 * i + lane];
    return out;
}

__device__ inline Vector norm_backward(const Vector& grad, const Normed& n, const float* ln, int lane) {
    Vector g;
    EACH(i) g.x[i] = grad.x[i] * ln[32 * i + lane];
    float sum[2] = {0.f, inner(g, n.hat)};
    EACH(i) sum[0] += g.x[i];
    warp_sum(sum);
    EACH(i) g.x[i] = inside(i, lane) ? n.rstd * (g.x[i] - (1.f / N) * (sum[0] + n.hat.x[i] * sum[1])) : 0.f;
    return g;
}

// Weight and bias of the INPUTS norms (tau, u, candidate) to shared memory, which is zero before.
__device__ inline void stage_norms(float* ln, const float* weight, const float* bias, int tid) {
    for (int i = tid; i < INPUTS * N; i += THREADS) {
        ln[i / N * 2 * NV + i % N] = weight[i];
        ln[i / N * 2 * NV + NV + i % N] = bias[i];
    }
}

// ---- the step -----------------------------------------------------------------------------------------------------

struct Rotation {  // H_m H_e, which turns e = eps/|eps| into w = tau/|tau|; H_x = I - 2 x x^T
    Vector w, m;
    float inv_tau;  // 1/|tau|, 0 if nothing turns
    float inv_sum;  // 1/|e + w|, 0 if m does not depend on them
    float m_e, m_h, e_h;  // inner products
};

// A unit vector orthogonal to e: the axis where |e| is smallest (the first one), made orthogonal to e.
__device__ inline Vector orthogonal_to(const Vector& e, int lane) {
    float least = 3.4e38f;
    int at = N;
    EACH(i) if (inside(i, lane) && fabsf(e.x[i]) < least) least = fabsf(e.x[i]), at = 32 * i + lane;
    for (int mask = 16; mask > 0; mask /= 2) {
        float other = shuffle(least, mask);
        int other_at = __shfl_xor_sync(0xffffffffu, at, mask);
        if (other < least || (other == least && other_at < at)) least = other, at = other_at;
    }
    float e_at = 0.f;
    EACH(i) if (32 * i + lane == at) e_at = e.x[i];
    e_at = warp_sum(e_at);
    Vector f;
    EACH(i) f.x[i] = (32 * i + lane == at ? 1.f : 0.f) - e_at * e.x[i];
    return scaled(f, inverse_root(warp_sum(inner(f, f))));
}

__device__ inline Rotation rotation(const Vector& e, float inv_eps, const Vector& tau, const Vector& h, int lane) {
    Rotation rot;
    rot.inv_tau = N == 1 || inv_eps == 0.f ? 0.f : inverse_length(warp_sum(inner(tau, tau)));
    bool no_rotation = rot.inv_tau == 0.f;
    rot.w = scaled(tau, rot.inv_tau);
    Vector e_plus_w;
    EACH(i) e_plus_w.x[i] = e.x[i] + rot.w.x[i];
    float sum[4] = {inner(e_plus_w, e_plus_w), inner(e_plus_w, e), inner(e_plus_w, h), inner(e, h)};
    warp_sum(sum);
    // Rounding leaves e and w with lengths of 1 + 1e-7; near opposite vectors the part of e + w along e is as small and
    // the angle would be off by 1e-7/|e + w|. The part across e is safe, and gives the part along it.
    float across = sum[0] - sum[1] * sum[1], along = __fdividef(across, 2.f - sum[1]), correction = along - sum[1];
    bool wide = sum[1] < 1.f && sum[0] > OPPOSITE;
    if (wide) {
        EACH(i) e_plus_w.x[i] += correction * e.x[i];
        sum[0] = across + along * along, sum[1] = along, sum[2] += correction * sum[3];
    }
    rot.e_h = sum[3];
    if (!no_rotation && sum[0] <= OPPOSITE) {  // the same in every lane
        rot.inv_sum = 0.f;
        rot.m = orthogonal_to(e, lane);
        float products[2] = {inner(rot.m, e), inner(rot.m, h)};
        warp_sum(products);
        rot.m_e = products[0], rot.m_h = products[1];
    } else {
        rot.inv_sum = no_rotation ? 0.f : inverse_root(sum[0]);
        rot.m = scaled(e_plus_w, rot.inv_sum);
        rot.m_e = sum[1] * rot.inv_sum, rot.m_h = sum[2] * rot.inv_sum;
    }
    return rot;
}

__device__ inline u32 hash32(u32 x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

__device__ inline u32 zoneout_key(const i64* seed, int t) { return hash32((u32)*seed ^ (u32)t * 0x9e3779b9u); }
