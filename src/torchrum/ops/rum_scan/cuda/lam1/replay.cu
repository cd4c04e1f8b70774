// P_t h_{t-1} and the last P_t = Rot_1 ... Rot_t of one batch row, from the gates and states: the gradient of the
// initial memory needs them. Rarely asked for, so nothing is prefetched.

extern "C" __global__ void __launch_bounds__(THREADS, 1) lam1_replay(
    const io_t* xp, const float* bias, const float* h0, const float* ln_weight, const float* ln_bias, const i64* lengths,
    const io_t* out, const float* gates, float* rotated_h, float* P_n, int T, int B, float ln_eps) {
    SHARED_MEMORY(shared);
    const ThreadPosition p = thread_position();
    const int lane = p.lane, b = blockIdx.x;
    float *along_e = shared, *along_m = shared + NV, *ln = shared + 2 * NV;
    float* own = ln + 2 * INPUTS * NV + p.warp * 3 * NV;
    float *own_h = own, *own_e = own + NV, *own_m = own + 2 * NV;
    static_assert(NV * (2 + 2 * INPUTS + 3 * WARPS) <= SHARED_FLOATS, "shared memory");

    for (int i = p.tid; i < SHARED_FLOATS; i += THREADS) shared[i] = 0.f;
    __syncthreads();
    if (LN) stage_norms(ln, ln_weight, ln_bias, p.tid);
    __syncthreads();
    Tile P;
    identity_tile(P, p);
    const int length = lengths ? (int)(lengths[b] < T ? lengths[b] : T) : T;

    for (int t = 0; t < length; ++t) {
        const i64 at = (i64)t * B + b;
        Vector h, e, tau;
        EACH(i) {
            const int j = 32 * i + lane;
            const bool in = inside(i, lane);
            h.x[i] = !in ? 0.f : t > 0 ? load(out, (at - B) * N + j) : h0 ? h0[(i64)b * N + j] : 0.f;
            e.x[i] = in ? with_bias(load(xp, at * INPUTS * N + GATES * N + j), bias, GATES * N + j) : 0.f;
            tau.x[i] = in ? gates[at * GATE_STRIDE + j] : 0.f;
        }
        const float inv_eps = inverse_length(warp_sum(inner(e, e)));
        e = scaled(e, inv_eps);
        if (LN) tau = affine(normalise(tau, ln_eps, lane).hat, ln, lane);
        EACH(i) tau.x[i] = inside(i, lane) ? tau.x[i] : 0.f;
        const Rotation rot = rotation(e, inv_eps, tau, h, lane);
        __syncwarp();
        write(own_h, h, lane);
        write(own_e, scaled(e, rot.inv_tau == 0.f ? 0.f : 1.f), lane);
        write(own_m, rot.m, lane);
        __syncwarp();

        Rows s_h = {}, s_e = {}, s_m = {};
        UNROLL for (int k = 0; k < CHUNKS; ++k) {
            multiply(s_h, P, k, chunk(own_h, k, p.segment));
            multiply(s_e, P, k, chunk(own_e, k, p.segment));
            multiply(s_m, P, k, chunk(own_m, k, p.segment));
        }
        const float P_h = reduce_rows(s_h, p.segment), P_m = reduce_rows(s_m, p.segment);
        const float P_me = 2.f * (reduce_rows(s_e, p.segment) - 2.f * rot.m_e * P_m);
        if (p.owner) {
            along_m[p.own] = -2.f * P_m;
            along_e[p.own] = -P_me;
            if (p.own < N) rotated_h[at * N + p.own] = P_h - 2.f * rot.m_h * P_m - rot.e_h * P_me;
        }
        __syncwarp();
        add_outer(P, rows(along_m, p.row), own_m, rows(along_e, p.row), own_e, p.segment);
    }
    store_tile(P, P_n + (i64)b * N * N, p);
}
