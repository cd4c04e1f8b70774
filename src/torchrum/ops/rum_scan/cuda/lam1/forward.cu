// The whole sequence of one batch row: R <- R H_m H_e, z = R h, and the state's update. R and W_hh in registers.

extern "C" __global__ void __launch_bounds__(THREADS, 1) lam1_forward(
    const io_t* xp, const float* h0, const float* R0, const float* weight, const float* ln_weight, const float* ln_bias,
    const i64* lengths, const i64* seed, const float* bias, io_t* out, float* R_n, float* checkpoints,
    io_t* last_copy, io_t* out_copy, float* R_copy, int T, int B,
    float eta, float ln_eps, float zoneout, u32 keep_below) {
    SHARED_MEMORY(shared);
    const ThreadPosition p = thread_position();
    const int lane = p.lane, b = blockIdx.x;

    float* raw = shared;  // W_hh h: tau, u
    float* rotated_h = raw + 2 * NV;  // z
    float* along_e = rotated_h + NV;  // -2 R H_m e and -2 R m
    float* along_m = along_e + NV;
    float* ln = along_m + NV;
    float* inputs = ln + (LN ? 2 * INPUTS * NV : 0);  // xp of two steps
    float* own = inputs + 2 * INPUTS * NV + p.warp * 4 * NV;  // this warp's copies
    float *own_h = own, *own_e = own + NV, *own_m = own + 2 * NV;
    float* own_hw = DTYPE ? own + 3 * NV : own_h;  // h as it enters the matmul with W_hh
    static_assert(NV * (5 + (LN ? 2 * INPUTS : 0) + 2 * INPUTS + 4 * WARPS) <= SHARED_FLOATS, "shared memory");

    for (int i = p.tid; i < SHARED_FLOATS; i += THREADS) shared[i] = 0.f;
    Tile R, W_tau, W_u;
    if (R0) load_tile(R, R0 + (i64)b * N * N, N, 1, p);
    else identity_tile(R, p);
    load_tile(W_tau, weight, N, 1, p);
    if (GATES == 2) load_tile(W_u, weight + N * N, N, 1, p);
    const int length = lengths ? (int)(lengths[b] < T ? lengths[b] : T) : T;
    __syncthreads();

    // xp of the next step waits in registers (prefetched); once it is stored, the loads for the step after it start
    float prefetched[INPUTS] = {};
    auto fetch = [&](int t) {
        if (p.tid < N && t < length)
            UNROLL for (int g = 0; g < INPUTS; ++g) prefetched[g] = load(xp, ((i64)t * B + b) * INPUTS * N + g * N + p.tid);
    };
    auto store_prefetched = [&](int t) {
        if (p.tid < N)
            UNROLL for (int g = 0; g < INPUTS; ++g)
                inputs[((t & 1) * INPUTS + g) * NV + p.tid] = with_bias(prefetched[g], bias, g * N + p.tid);
    };
    if (LN) stage_norms(ln, ln_weight, ln_bias, p.tid);
    if (length > 0) fetch(0), store_prefetched(0);
    fetch(1);
    __syncthreads();

    Vector h, e;
    EACH(i) h.x[i] = inside(i, lane) && h0 ? h0[(i64)b * N + 32 * i + lane] : 0.f;
    e = read(inputs + GATES * NV, lane);
    float inv_eps = inverse_length(warp_sum(inner(e, e)));
    e = scaled(e, inv_eps);
    auto own_write = [&] {
        write(own_h, h, lane);
        write(own_e, e, lane);
        if (DTYPE) EACH(i) own_hw[32 * i + lane] = rounded(h.x[i]);
        __syncwarp();
    };
    own_write();
    auto write_state = [&](int t) {
        write_global(out, ((i64)t * B + b) * N, h, lane);
        if (out_copy) write_global(out_copy, ((i64)t * B + b) * N, h, lane);
        if (last_copy && t == T - 1) write_global(last_copy, (i64)b * N, h, lane);
    };

    for (int t = 0; t < length; ++t) {
        const float* x = inputs + (t & 1) * INPUTS * NV;
        Rows s_tau = {}, s_u = {}, s_h = {}, s_e = {};
        UNROLL for (int k = 0; k < CHUNKS; ++k) {
            Chunk hw = chunk(own_hw, k, p.segment), hc = DTYPE ? chunk(own_h, k, p.segment) : hw;
            multiply(s_tau, W_tau, k, hw);
            if (GATES == 2) multiply(s_u, W_u, k, hw);
            multiply(s_h, R, k, hc);
            multiply(s_e, R, k, chunk(own_e, k, p.segment));
        }
        const float row_tau = reduce_rows(s_tau, p.segment);
        const float row_u = GATES == 2 ? reduce_rows(s_u, p.segment) : 0.f;
        if (p.owner) raw[p.own] = row_tau, raw[NV + p.own] = row_u;
        const float R_h = reduce_rows(s_h, p.segment), R_e = reduce_rows(s_e, p.segment);
        __syncthreads();

        Vector tau, gate;
        EACH(i) tau.x[i] = raw[32 * i + lane] + x[32 * i + lane];
        if (GATES == 2) EACH(i) gate.x[i] = raw[NV + 32 * i + lane] + x[NV + 32 * i + lane];
        if (LN) tau = affine(normalise(tau, ln_eps, lane).hat, ln, lane);
        EACH(i) tau.x[i] = inside(i, lane) ? tau.x[i] : 0.f;
        const Rotation rot = rotation(e, inv_eps, tau, h, lane);
        const float reflect_factor = rot.inv_tau == 0.f ? 0.f : 2.f;
        write(own_m, rot.m, lane);
        __syncwarp();

        Rows s_m = {};
        UNROLL for (int k = 0; k < CHUNKS; ++k) multiply(s_m, R, k, chunk(own_m, k, p.segment));
        const float R_m = reduce_rows(s_m, p.segment);
        const float R_me = reflect_factor * (R_e - 2.f * rot.m_e * R_m);  // 2 R H_m e
        if (p.owner) {
            rotated_h[p.own] = R_h - 2.f * rot.m_h * R_m - rot.e_h * R_me;
            along_m[p.own] = -2.f * R_m;
            along_e[p.own] = -R_me;
        }
        store_prefetched(t + 1);
        fetch(t + 2);
        if (GATES == 2 && LN == 1) gate = affine(normalise(gate, ln_eps, lane).hat, ln + 2 * NV, lane);
        if (GATES == 2) EACH(i) gate.x[i] = inside(i, lane) ? sigmoid(gate.x[i]) : 0.f;
        if (GATES == 2 && LN == 2) gate = affine(normalise(gate, ln_eps, lane).hat, ln + 2 * NV, lane);
        __syncthreads();

        // A reflection of R's rows keeps what rounding has added to |R x|, step after step. With 2 - (|R x|^2 - 1)/2 in
        // place of 2 it is taken out again.
        const Vector all_m = read(along_m, lane), all_e = read(along_e, lane);
        float squared_norms[2] = {inner(all_m, all_m), inner(all_e, all_e)};
        warp_sum(squared_norms);
        const float correction_m = 1.25f - 0.0625f * squared_norms[0], correction_e = 1.25f - 0.0625f * squared_norms[1];
        Rows by_m = rows(along_m, p.row), by_e = rows(along_e, p.row);
        UNROLL for (int r = 0; r < RP; ++r) {
            by_e.x[r] = correction_e * (by_e.x[r] - reflect_factor * rot.m_e * (correction_m - 1.f) * by_m.x[r]);
            by_m.x[r] *= correction_m;
        }
        add_outer(R, by_m, own_m, by_e, own_e, p.segment);
        if (checkpoints && (t + 1) % EVERY == 0 && t + 1 < T) store_tile(R, checkpoints + ((i64)((t + 1) / EVERY - 1) * B + b) * N * N, p);

        Vector new_h, next_eps;
        EACH(i) new_h.x[i] = rotated_h[32 * i + lane] + x[GATES * NV + 32 * i + lane];
        if (LN) new_h = affine(normalise(new_h, ln_eps, lane).hat, ln + 2 * GATES * NV, lane);
        EACH(i) new_h.x[i] = inside(i, lane) ? activate<ACT>(new_h.x[i]) : 0.f;
        if (GATES == 2) EACH(i) new_h.x[i] = gate.x[i] * h.x[i] + (1.f - gate.x[i]) * new_h.x[i];
        next_eps = read(inputs + ((~t & 1) * INPUTS + GATES) * NV, lane);
        float squares[2] = {inner(next_eps, next_eps), inner(new_h, new_h)};
        warp_sum(squares);
        inv_eps = inverse_length(squares[0]);
        e = scaled(next_eps, inv_eps);
        if (ETA) new_h = scaled(new_h, eta * inverse_length(squares[1]));
        if (ZONE) {
            const u32 key = ZONE == 1 ? zoneout_key(seed, t) : 0;
            EACH(i) {
                if (ZONE == 2) new_h.x[i] = (1.f - zoneout) * new_h.x[i] + zoneout * h.x[i];
                else if (hash32(key ^ (u32)(b * N + 32 * i + lane)) >= keep_below) new_h.x[i] = h.x[i];
            }
        }
        h = new_h;
        if (p.warp == 0) write_state(t);
        __syncwarp();
        own_write();
    }

    store_tile(R, R_n + (i64)b * N * N, p);
    if (R_copy) store_tile(R, R_copy + (i64)b * N * N, p);
    for (int t = length + p.warp; t < T; t += WARPS) write_state(t);  // frozen
}
