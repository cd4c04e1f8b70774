// Gradients of lam1_forward for one batch row, last step first.
//
// R is turned back step by step, R_{t-1} = R_t H_e H_m, and taken again from a checkpoint every EVERY steps. It is kept
// twice, also as its transpose, because both R x and R^T x are needed and a sum along a thread's rows is cheap.
// Of A = R^T dL/dR only the antisymmetric part K = A - A^T acts on the rotations:
//   k = R^T g;  K += k h^T - h k^T;  a = K e;  de = -2 a;  b = H_e K H_e m;  dm = -2 b;  K <- H_m H_e K H_e H_m.
// lam1.md has the derivation. In float32 gates lies in grad_xp: a step's are read two steps before it is written.

constexpr int SAVED = 3 + GATES;  // h_{t-1}, grad_out, eps, tau, u
constexpr bool W_IN_REGISTERS = SAVED * RP * COLUMNS + 100 <= REGISTERS;  // beside R, its transpose and K

extern "C" __global__ void __launch_bounds__(THREADS, 1) lam1_backward(
    const io_t* grad_out, const io_t* xp, const float* h0, const float* weight, const float* ln_weight,
    const float* ln_bias, const i64* lengths, const i64* seed, const float* bias, const io_t* out, const float* gates, const float* R_n,
    const float* checkpoints, const float* K_n, io_t* grad_xp, float* grad_h0, float* grad_ln, float* grad_z, int T, int B,
    float eta, float ln_eps, float zoneout, u32 keep_below) {
    SHARED_MEMORY(shared);
    const ThreadPosition p = thread_position();
    const int lane = p.lane, b = blockIdx.x;

    float* products = shared;  // R h, R e, R m, K e, K m of two steps: the slowest warp may still read the last one's
    float* shared_k = products + 10 * NV;  // k
    float* through_W = shared_k + NV;  // W_hh^T times the gates' gradient
    float* ln = through_W + NV;
    float* ln_sums = ln + (LN ? 2 * INPUTS * NV : 0);
    float* saved = ln_sums + (LN ? 2 * INPUTS * NV : 0);  // inputs of two steps
    float* own = saved + 2 * SAVED * NV + p.warp * 9 * NV;  // this warp's copies
    float *own_h = own, *own_e = own + NV, *own_m = own + 2 * NV, *own_g = own + 3 * NV, *own_k = own + 4 * NV;
    float *own_a = own + 5 * NV, *own_b = own + 6 * NV, *own_dtau = own + 7 * NV, *own_du = own + 8 * NV;
    constexpr int VECTORS = NV * (12 + (LN ? 4 * INPUTS : 0) + 2 * SAVED + 9 * WARPS);
    float* W = shared + VECTORS;  // each thread's tiles of W_hh^T, column by column
    static_assert(VECTORS + (W_IN_REGISTERS ? 0 : GATES * RP * COLUMNS * THREADS) <= SHARED_FLOATS, "shared memory");

    for (int i = p.tid; i < VECTORS; i += THREADS) shared[i] = 0.f;
    Tile R, R_t, K, W_tau, W_u;
    auto load_R = [&](const float* matrix) {
        load_tile(R, matrix, N, 1, p);
        load_tile(R_t, matrix, 1, N, p);
    };
    load_R(R_n + (i64)b * N * N);
    if (K_n) load_tile(K, K_n + (i64)b * N * N, N, 1, p);
    else zero_tile(K);
    load_tile(W_tau, weight, 1, N, p);
    if (GATES == 2) load_tile(W_u, weight + N * N, 1, N, p);
    if (!W_IN_REGISTERS) {
        UNROLL for (int c = 0; c < COLUMNS; ++c) UNROLL for (int r = 0; r < RP; ++r) {
            W[(c * THREADS + p.tid) * RP + r] = W_tau.v[r][c];
            if (GATES == 2) W[((COLUMNS + c) * THREADS + p.tid) * RP + r] = W_u.v[r][c];
        }
    }
    const int length = lengths ? (int)(lengths[b] < T ? lengths[b] : T) : T;
    __syncthreads();

    float prefetched[SAVED] = {};
    auto fetch = [&](int t) {
        if (p.tid < N && t >= 0) {
            const i64 at = (i64)t * B + b;
            prefetched[0] = t > 0 ? load(out, (at - B) * N + p.tid) : h0 ? h0[(i64)b * N + p.tid] : 0.f;
            prefetched[1] = load(grad_out, at * N + p.tid);
            prefetched[2] = load(xp, at * INPUTS * N + GATES * N + p.tid);
            UNROLL for (int g = 0; g < GATES; ++g) prefetched[3 + g] = gates[at * GATE_STRIDE + g * N + p.tid];
        }
    };
    auto store_prefetched = [&](int t) {
        if (p.tid < N)
            UNROLL for (int g = 0; g < SAVED; ++g)
                saved[((t & 1) * SAVED + g) * NV + p.tid] = g == 2 ? with_bias(prefetched[g], bias, GATES * N + p.tid) : prefetched[g];
    };
    if (LN) stage_norms(ln, ln_weight, ln_bias, p.tid);
    fetch(length - 1);
    store_prefetched(length - 1);
    fetch(length - 2);

    // past the row's length the state was frozen: its gradients add up
    Vector grad_h;  // gradient of the state, but for through_W
    EACH(i) grad_h.x[i] = 0.f;
    for (int t = T - 1; t >= length; --t) {
        const i64 at = (i64)t * B + b;
        EACH(i) if (inside(i, lane)) grad_h.x[i] += load(grad_out, at * N + 32 * i + lane);
        for (int i = p.tid; i < INPUTS * N; i += THREADS) store(grad_xp, at * INPUTS * N + i, 0.f);
    }
    __syncthreads();

    // What a step needs of its own inputs; ready before the gradient arrives.
    Vector h, e, gate;
    Normed n_tau, n_gate;
    Rotation rot;
    float inv_eps;
    auto prepare = [&](int t) {
        const float* x = saved + (t & 1) * SAVED * NV;
        h = read(x, lane);
        e = read(x + 2 * NV, lane);
        inv_eps = inverse_length(warp_sum(inner(e, e)));
        e = scaled(e, inv_eps);
        Vector tau = read(x + 3 * NV, lane);
        if (LN) {
            n_tau = normalise(tau, ln_eps, lane);
            tau = affine(n_tau.hat, ln, lane);
        }
        EACH(i) tau.x[i] = inside(i, lane) ? tau.x[i] : 0.f;
        rot = rotation(e, inv_eps, tau, h, lane);
        if (rot.inv_tau == 0.f) {  // nothing turns: e = m = 0 and every term below vanishes
            inv_eps = rot.e_h = 0.f;
            EACH(i) e.x[i] = 0.f;
        }
        if (GATES == 2) {
            gate = read(x + 4 * NV, lane);
            if (LN == 1) gate = affine((n_gate = normalise(gate, ln_eps, lane)).hat, ln + 2 * NV, lane);
            EACH(i) gate.x[i] = inside(i, lane) ? sigmoid(gate.x[i]) : 0.f;
            if (LN == 2) gate = affine((n_gate = normalise(gate, ln_eps, lane)).hat, ln + 2 * NV, lane);
        }
        __syncwarp();
        write(own_h, h, lane);
        write(own_e, e, lane);
        write(own_m, rot.m, lane);
        __syncwarp();
    };
    auto norm_back = [&](int block, const Vector& grad, const Normed& n) {
        float* sums = ln_sums + 2 * block * NV;
        if (p.warp == WARPS - 1) EACH(i) {
            sums[32 * i + lane] += grad.x[i] * n.hat.x[i];
            sums[NV + 32 * i + lane] += grad.x[i];
        }
        return norm_backward(grad, n, ln + 2 * block * NV, lane);
    };
    if (length > 0) prepare(length - 1);

    for (int t = length - 1; t >= 0; --t) {
        const float* x = saved + (t & 1) * SAVED * NV;
        float* product = products + (t & 1) * 5 * NV;
        {
            Rows s_h = {}, s_e = {}, s_m = {}, s_Ke = {}, s_Km = {};
            UNROLL for (int k = 0; k < CHUNKS; ++k) {
                multiply(s_h, R, k, chunk(own_h, k, p.segment));
                const Chunk ec = chunk(own_e, k, p.segment), mc = chunk(own_m, k, p.segment);
                multiply(s_e, R, k, ec);
                multiply(s_m, R, k, mc);
                multiply(s_Ke, K, k, ec);
                multiply(s_Km, K, k, mc);
            }
            const float row_h = reduce_rows(s_h, p.segment), row_e = reduce_rows(s_e, p.segment);
            const float row_m = reduce_rows(s_m, p.segment), row_Ke = reduce_rows(s_Ke, p.segment);
            const float row_Km = reduce_rows(s_Km, p.segment);
            if (p.owner) {
                product[p.own] = row_h, product[NV + p.own] = row_e, product[2 * NV + p.own] = row_m;
                product[3 * NV + p.own] = row_Ke, product[4 * NV + p.own] = row_Km;
            }
        }
        __syncthreads();

        Vector candidate, grad_eps, grad_gate;  // the candidate, gradients of eps and of the raw gate
        {
            Normed n_candidate;
            Vector argument, grad;
            EACH(i) argument.x[i] = product[32 * i + lane] + x[2 * NV + 32 * i + lane];
            if (LN) argument = affine((n_candidate = normalise(argument, ln_eps, lane)).hat, ln + 2 * GATES * NV, lane);
            EACH(i) candidate.x[i] = inside(i, lane) ? activate<ACT>(argument.x[i]) : 0.f;
            EACH(i) grad.x[i] = grad_h.x[i] + through_W[32 * i + lane] + x[NV + 32 * i + lane];
            if (ZONE) {
                const u32 key = ZONE == 1 ? zoneout_key(seed, t) : 0;
                EACH(i) {
                    const bool keep = hash32(key ^ (u32)(b * N + 32 * i + lane)) < keep_below;
                    const float share = ZONE == 2 ? 1.f - zoneout : keep ? 1.f : 0.f;
                    grad_h.x[i] = (1.f - share) * grad.x[i];
                    grad.x[i] *= share;
                }
            } else {
                EACH(i) grad_h.x[i] = 0.f;
            }
            if (ETA) {
                Vector mixed = candidate;
                if (GATES == 2) EACH(i) mixed.x[i] = gate.x[i] * h.x[i] + (1.f - gate.x[i]) * candidate.x[i];
                float sum[2] = {inner(mixed, mixed), inner(mixed, grad)};
                warp_sum(sum);
                const float inverse = inverse_length(sum[0]);
                EACH(i) grad.x[i] = eta * inverse * (grad.x[i] - mixed.x[i] * (sum[1] * inverse * inverse));
            }
            if (GATES == 2) EACH(i) {
                grad_gate.x[i] = grad.x[i] * (h.x[i] - candidate.x[i]);
                grad_h.x[i] += grad.x[i] * gate.x[i];
                grad.x[i] *= 1.f - gate.x[i];
            }
            EACH(i) grad.x[i] *= slope<ACT>(argument.x[i], candidate.x[i]);
            grad_eps = LN ? norm_back(GATES, grad, n_candidate) : grad;
        }
        write(own_g, grad_eps, lane);
        __syncwarp();

        Rows s_k = {};
        UNROLL for (int k = 0; k < CHUNKS; ++k) multiply(s_k, R_t, k, chunk(own_g, k, p.segment));
        const float row_k = reduce_rows(s_k, p.segment);
        if (p.owner) shared_k[p.own] = row_k;
        store_prefetched(t - 1);
        fetch(t - 2);
        if (GATES == 2) {
            if (LN == 2) grad_gate = norm_back(1, grad_gate, n_gate);
            EACH(i) {
                const float s = LN == 2 ? sigmoid(x[4 * NV + 32 * i + lane]) : gate.x[i];
                grad_gate.x[i] *= s * (1.f - s);
            }
            if (LN == 1) grad_gate = norm_back(1, grad_gate, n_gate);
            if (p.warp == 0) write_global(grad_xp, ((i64)t * B + b) * INPUTS * N + N, grad_gate, lane);
            write(own_du, grad_gate, lane);
        }
        if (grad_z && p.warp == 0) write_global(grad_z, ((i64)t * B + b) * N, grad_eps, lane);
        __syncthreads();

        {
            const Vector k = read(shared_k, lane), Km = read(product + 4 * NV, lane);
            Vector a = read(product + 3 * NV, lane), bb, grad_tau;
            float sum[3] = {inner(k, e), inner(k, rot.m), inner(e, Km)};
            warp_sum(sum);
            const float e_b = sum[2] + sum[0] * rot.m_h - rot.e_h * sum[1];  // e . K m, which is -e . b
            EACH(i) {
                a.x[i] += k.x[i] * rot.e_h - h.x[i] * sum[0];
                bb.x[i] = Km.x[i] + k.x[i] * rot.m_h - h.x[i] * sum[1] - 2.f * (rot.m_e * a.x[i] + e_b * e.x[i]);
                grad_h.x[i] += k.x[i];
                const float grad_sum = -2.f * rot.inv_sum * bb.x[i], along = 2.f * rot.inv_sum * e_b;
                grad_eps.x[i] += inv_eps * (grad_sum - 2.f * a.x[i] - along * e.x[i]);
                grad_tau.x[i] = rot.inv_tau * (grad_sum + along * rot.w.x[i]);
            }
            if (LN) grad_tau = norm_back(0, grad_tau, n_tau);
            write(own_dtau, grad_tau, lane);
            write(own_k, k, lane);
            write(own_a, scaled(a, 2.f), lane);
            write(own_b, scaled(bb, 2.f), lane);
            if (p.warp == WARPS - 1) {
                write_global(grad_xp, ((i64)t * B + b) * INPUTS * N, grad_tau, lane);
                write_global(grad_xp, ((i64)t * B + b) * INPUTS * N + GATES * N, grad_eps, lane);
            }
            __syncwarp();
        }

        Rows s_W = {};
        UNROLL for (int k = 0; k < CHUNKS; ++k) {
            const Chunk c_tau = chunk(own_dtau, k, p.segment), c_u = chunk(own_du, k, p.segment);
            if (W_IN_REGISTERS) {
                multiply(s_W, W_tau, k, c_tau);
                if (GATES == 2) multiply(s_W, W_u, k, c_u);
            } else {
                UNROLL for (int n = 0; n < 4; ++n) if (n < chunk_width(k)) {
                    const Rows w_tau = rows(W, ((4 * k + n) * THREADS + p.tid) * RP);
                    UNROLL for (int r = 0; r < RP; ++r) s_W.x[r] += w_tau.x[r] * c_tau.x[n];
                    if (GATES == 1) continue;
                    const Rows w_u = rows(W, ((COLUMNS + 4 * k + n) * THREADS + p.tid) * RP);
                    UNROLL for (int r = 0; r < RP; ++r) s_W.x[r] += w_u.x[r] * c_u.x[n];
                }
            }
        }
        const float row_W = reduce_rows(s_W, p.segment);
        if (p.owner) through_W[p.own] = row_W;

        {
            Rows of_e = rows(own_e, p.row), of_m = rows(own_m, p.row), along_e, along_m;
            UNROLL for (int r = 0; r < RP; ++r) along_e.x[r] = -2.f * (of_e.x[r] - 2.f * rot.m_e * of_m.x[r]);
            UNROLL for (int r = 0; r < RP; ++r) along_m.x[r] = -2.f * of_m.x[r];
            add_outer(R_t, along_e, product + NV, along_m, product + 2 * NV, p.segment);
            const Rows R_e = rows(product + NV, p.row), R_m = rows(product + 2 * NV, p.row);
            UNROLL for (int r = 0; r < RP; ++r) along_e.x[r] = -2.f * R_e.x[r];
            UNROLL for (int r = 0; r < RP; ++r) along_m.x[r] = -2.f * (R_m.x[r] - 2.f * rot.m_e * R_e.x[r]);
            add_outer(R, along_e, own_e, along_m, own_m, p.segment);
        }
        auto add_skew = [&](const float* left, const float* right) {  // K += left right^T - right left^T
            Rows minus = rows(right, p.row);
            UNROLL for (int r = 0; r < RP; ++r) minus.x[r] = -minus.x[r];
            add_outer(K, rows(left, p.row), right, minus, left, p.segment);
        };
        add_skew(own_k, own_h);
        add_skew(own_e, own_a);
        add_skew(own_m, own_b);
        if (t > 0 && t % EVERY == 0) load_R(checkpoints + ((i64)(t / EVERY - 1) * B + b) * N * N);
        if (t > 0) prepare(t - 1);
    }

    __syncthreads();
    if (p.warp == 0) {
        EACH(i) grad_h.x[i] += through_W[32 * i + lane];
        if (grad_h0) write_global(grad_h0, (i64)b * N, grad_h, lane);
    }
    if (LN)
        for (int i = p.tid; i < 2 * INPUTS * N; i += THREADS)
            grad_ln[(i64)b * 2 * INPUTS * N + i] = ln_sums[i / N * NV + i % N];
}
