// The scan's gradient in one launch, from the last step to the first. The weights' gradient is one product afterwards.
//
// Step t: from dL/dh(t) and the saved gates and row scalars, exchange three row sums (four where eps and tau are
// opposite), then publish the gates' gradient; gather the tile's, multiply by the block's columns of the weights,
// add up over the warps: dL/dh(t-1) of the block's units. Everything between the sums is linear in dL/dh(t), so the
// sum for eta's normalisation need not be known before the two of the rotation.

#define INNER (GATES * NP)
#define TILE_WORDS (INNER * ROWS / 2)
#define QUARTER_BYTES (INNER / 4 * ROWS * 2)

struct BackwardArgs {
    const u16 *grad_out, *xp, *weight, *out, *gates;
    const float *h0, *stats;
    const i64 *lengths, *seed;
    u16* dxp;
    float* dh0;
    u32* grads;    // (T, tiles, TILE_WORDS): the gates' gradient of each step, [row of the weights / 8][row][% 8]
    float* early;  // boards: (T, tiles, NT, BOARD)
    i64* profile;  // (blocks, 8) with PROFILE
    i64 T, B, N, tiles, groups, keep_below;
    double eta, zoneout;
};

// k-steps of a stage go to the warpgroup's two pairs of warps in turn.
template <int FIRST>
DEVICE void multiply_stages(float (&c)[NT][4], const Weights& weight, Quad (&v)[NT], char* grads, const u32* from, int g, int thread, Profile& profile) {
    if constexpr (FIRST < STEPS) {
        const int LAST = FIRST + STAGE_STEPS / 2 < STEPS ? FIRST + STAGE_STEPS / 2 : STEPS, at = 2 * FIRST / STAGE_STEPS * STAGE_BYTES;
        finish_stage<2 * (STEPS - FIRST)>(v, grads + at, from + at / 4, thread);
        warpgroup_sync(g);
        if (FIRST == 0) profile.mark(0);
        if constexpr (LAST < STEPS) peek_stage<2 * (STEPS - LAST)>(v, from + (at + STAGE_BYTES) / 4, thread);
        const Cores cores = cores_at(grads + thread / 64 * ROWS * 32);
#pragma unroll
        for (int s = FIRST; s < LAST; s++) multiply_step(c, weight.get(s).a, cores, 2 * s * ROWS * 32);
        multiply_stages<LAST>(c, weight, v, grads, from, g, thread, profile);
    }
}

KERNEL rum_persistent_backward(const BackwardArgs a) {
    const int g = THREAD / 128, thread = THREAD % 128, w = thread / 32, lane = THREAD % 32, i = lane / 4, q = lane % 4;
    const int group = BLOCK / GROUP, cta = BLOCK % GROUP, T = (int)a.T, B = (int)a.B, N = (int)a.N;
    const int unit = cta * UNITS + 8 * w + i, pair = cta * UNITS + 8 * w + 2 * q;
    const int split = 2 * g + w / 2, half_tile = w % 2;
    const bool real = unit < N, pointwise = g < NT;

    char* grad_bytes = shared_memory();
    float2* partial = (float2*)(grad_bytes + INNER * ROWS * 2);  // [2][8 splits][2 tiles][NT][2 halves][32 lanes]
    float* sums = (float*)(partial + 2 * 8 * 2 * NT * 2 * 32) + g * 320;  // this warpgroup's two [4][32] and a [8][8]

    Weights weight;
    weight.extra = (Quad*)(sums - g * 320 + 4 * 320);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        Fragment f;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int inner = g * (INNER / 4) + (2 * s + w / 2) * 16 + k / 2 * 8 + 2 * q, column = cta * UNITS + half_tile * 16 + k % 2 * 8 + i;
            int block = inner / NP, row = inner % NP;
            const u16* at = a.weight + ((i64)block * N + row) * N + column;
            f.a[k] = (column < N && row < N ? at[0] : 0u) | (column < N && row + 1 < N ? (u32)at[N] << 16 : 0u);
        }
        weight.set(s, f);
    }

    Profile profile;
    profile.start();
    for (int tile = group; tile < (int)a.tiles; tile += (int)a.groups) {
        const int b0 = tile * ROWS + 8 * g + 2 * q, b_load = tile * ROWS + 8 * g + i;
        const int count = pointwise && b_load < B ? pair_count(pair, N) : 0;
        const int core_word = ((cta * 4 + w) * ROWS + 8 * g) * 4 + lane;
        const int state_at = b_load * N + pair, gates_at = b_load * GATES * N + pair;
        float carry[2] = {0.f, 0.f};
        int length[2] = {T, T};
        u32 x_tau = 0, x_u = 0, x_eps = 0, x_h = 0, x_grad = 0;
        float x_stat = 0.f;

        auto load_inputs = [&](int t) {
            x_grad = load_pair(a.grad_out + (i64)t * (B * N) + state_at, count);
            const u16* gates = a.gates + (i64)t * (B * GATES * N) + gates_at;
            x_tau = load_pair(gates, count);
            if (GATES == 2) x_u = load_pair(gates + N, count);
            x_eps = load_pair(a.xp + (i64)t * (B * (GATES + 1) * N) + (gates_at + state_at - pair + GATES * N), count);
            if (t > 0)
                x_h = load_pair(a.out + (i64)(t - 1) * (B * N) + state_at, count);
            else
                x_h = count ? pack(a.h0[state_at], count == 2 ? a.h0[state_at + 1] : 0.f) : 0u;
            const int stat_row = tile * ROWS + 8 * g + thread / 8;
            if (thread < 64) x_stat = stat_row < B ? a.stats[((i64)t * B + stat_row) * 8 + thread % 8] : 0.f;
        };
        if (pointwise) {
            load_inputs(T - 1);
            if (LENGTHS)
#pragma unroll
                for (int r = 0; r < 2; r++)
                    if (b0 + r < B) length[r] = (int)a.lengths[b0 + r];
        }

        for (int t = T - 1; t >= 0; t--) {
            u32* grads = a.grads + (i64)(t * (int)a.tiles + tile) * TILE_WORDS;
            float straight[2] = {0.f, 0.f};  // what reaches h(t-1) outside the matrix product
            if (pointwise) {
                if (thread < 64) sums[256 + thread] = x_stat;
                const u32 p_tau = transpose(x_tau), p_u = GATES == 2 ? transpose(x_u) : 0u, p_eps = transpose(x_eps);
                const u32 p_h = transpose(x_h), p_grad = transpose(x_grad);
                if (t > 0) load_inputs(t - 1);
                warpgroup_sync(g);
                const float tau[2] = {low_half(p_tau), high_half(p_tau)}, eps[2] = {low_half(p_eps), high_half(p_eps)};
                const float h[2] = {low_half(p_h), high_half(p_h)}, raw_u[2] = {low_half(p_u), high_half(p_u)};
                const float grad[2] = {carry[0] + low_half(p_grad), carry[1] + high_half(p_grad)};
                const u32 key = ZONEOUT == 2 ? hash32((u32)a.seed[0] ^ (u32)t * 0x9E3779B9u) : 0;
                float v[8], u[2], y[2], rate[2], mixed[2], grad2[2];
                int mirror_unit[2] = {0, 0};
                float mirror_u[2] = {0.f, 0.f}, mirror_inv[2] = {0.f, 0.f}, mirror_flow[2] = {0.f, 0.f};
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float* stat = sums + 256 + (2 * q + r) * 8;
                    const Turn turn = turn_of(stat[0], stat[1], stat[2], stat[3], stat[4]);
                    HalfTurn mirror = {0, 0.f, 0.f, 0.f};
                    if (turn.opposite) {
                        const i64 row = (i64)t * B + b0 + r;
                        const u16* eps_row = a.xp + (row * (GATES + 1) + GATES) * N;
                        mirror = half_turn_of(eps_row, N, turn.inv_eps);
                        const int m = mirror.unit;
                        const float there = t > 0 ? from_half(a.out[(row - B) * N + m]) : a.h0[(i64)(b0 + r) * N + m];
                        mirror.along = (there - mirror.u * turn.p) * mirror.inv_norm;
                        const float e = from_half(eps_row[m]), x = e + turned(turn, mirror, m, e, 0.f, there), z = activate(x);
                        const float gate = GATES == 2 ? sigmoid(from_half(a.gates[(row * GATES + 1) * N + m])) : 0.f;
                        mirror_flow[r] = slope(x, z) * (1.f - gate) * (gate * there + (1.f - gate) * z);
                        mirror_unit[r] = m, mirror_u[r] = mirror.u, mirror_inv[r] = mirror.inv_norm;
                    }
                    const float x = eps[r] + turned(turn, mirror, unit, eps[r], tau[r], h[r]);
                    y[r] = activate(x);
                    u[r] = GATES == 2 ? sigmoid(raw_u[r]) : 0.f;
                    rate[r] = real ? slope(x, y[r]) * (1.f - u[r]) : 0.f;
                    mixed[r] = real ? u[r] * h[r] + (1.f - u[r]) * y[r] : 0.f;
                    const float share = share_of_new(key, (u32)(b0 + r) * (u32)N + unit, (u32)a.keep_below, (float)a.zoneout);
                    grad2[r] = share * grad[r];
                    straight[r] = (1.f - share) * grad[r];
                    v[4 * r] = mixed[r] * grad2[r];
                    v[4 * r + 1] = rate[r] * grad2[r] * eps[r] * turn.inv_eps;
                    v[4 * r + 2] = rate[r] * grad2[r] * tau[r] * turn.inv_tau;
                    v[4 * r + 3] = turn.opposite && unit == mirror_unit[r] ? rate[r] * grad2[r] : 0.f;
                }
                float* board = a.early + (i64)(t * (int)a.tiles + tile) * (NT * BOARD) + g * BOARD;
                publish_sums(v, sums, board, g, cta, thread);
                profile.mark(3);
                {
                    Quad packets[PASSES];
                    peek_sums(packets, board, thread);
                    add_sums(packets, sums + 128, board, thread);
                    warpgroup_sync(g);
                    profile.mark(4);
                }
                float d_tau[2], d_u[2], d_eps[2];
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    float s[4];
                    read_sums(s, sums + 128, 2 * q + r);
                    const float* stat = sums + 256 + (2 * q + r) * 8;
                    const Turn turn = turn_of(stat[0], stat[1], stat[2], stat[3], stat[4]);
                    float A = s[1], C = s[2], d_mixed = grad2[r], at_mirror = s[3];
                    if (ETA) {
                        const float inv = stat[5] > TINY ? 1.f / stat[5] : 0.f, scale = (float)a.eta * inv, along = s[0] * inv * inv;
                        A = scale * (A - along * turn.inv_eps * stat[6]);
                        C = scale * (C - along * turn.inv_tau * stat[7]);
                        d_mixed = scale * (d_mixed - along * mixed[r]);
                        at_mirror = scale * (at_mirror - along * mirror_flow[r]);
                    }
                    const float dz = rate[r] * d_mixed, e = eps[r] * turn.inv_eps, n = tau[r] * turn.inv_tau;
                    d_u[r] = real ? d_mixed * (h[r] - y[r]) * u[r] * (1.f - u[r]) : 0.f;
                    straight[r] += d_mixed * u[r];
                    if (turn.opposite) {  // two fixed mirrors for tau and h; eps moves the first
                        const float f = ((unit == mirror_unit[r] ? 1.f : 0.f) - mirror_u[r] * e) * mirror_inv[r];
                        const float back = dz - 2.f * (at_mirror - mirror_u[r] * A) * mirror_inv[r] * f;
                        d_tau[r] = 0.f;
                        d_eps[r] = dz + turn.inv_eps * (-2.f * (turn.p * back + A * h[r]) + 4.f * turn.p * A * e);
                        straight[r] += back - 2.f * A * e;
                    } else {
                        const float dp = (2.f - turn.k) * C - turn.k * A, dq = -turn.k * (A + C);
                        const float dc = turn.k * turn.k * (turn.p + turn.q) * (A + C);
                        straight[r] += dz + dp * e + dq * n;
                        d_tau[r] = turn.inv_tau * (turn.on_tau * dz + dq * h[r] + dc * e - (turn.on_tau * C + dq * turn.q + dc * turn.c) * n);
                        d_eps[r] = dz + turn.inv_eps * (turn.on_eps * dz + dp * h[r] + dc * n - (turn.on_eps * A + dp * turn.p + dc * turn.c) * e);
                    }
                    if (t >= length[r]) d_tau[r] = d_u[r] = d_eps[r] = 0.f, straight[r] = grad[r];
                    if (!real) d_tau[r] = d_eps[r] = straight[r] = 0.f;
                }
                const u32 o_tau = transpose(pack(d_tau[0], d_tau[1]));
                publish_word(grads + core_word, o_tau);
                u16* row = a.dxp + (i64)t * (B * (GATES + 1) * N) + (gates_at + state_at - pair);
                u32 o_u = 0;
                if (GATES == 2) {
                    o_u = transpose(pack(d_u[0], d_u[1]));
                    publish_word(grads + NP * ROWS / 2 + core_word, o_u);
                }
                profile.mark(5);
                store_pair(row, count, o_tau);
                if (GATES == 2) store_pair(row + N, count, o_u);
                store_pair(row + GATES * N, count, transpose(pack(d_eps[0], d_eps[1])));
            }

            profile.mark(6);
            Quad v_grads[NT];
            const u32* from = grads + g * (QUARTER_BYTES / 4);
            peek_stage<2 * STEPS>(v_grads, from, thread);
            float c[NT][4];
#pragma unroll
            for (int j = 0; j < NT; j++)
#pragma unroll
                for (int k = 0; k < 4; k++) c[j][k] = 0.f;
            multiply_stages<0>(c, weight, v_grads, grad_bytes + g * QUARTER_BYTES, from, g, thread, profile);
            profile.mark(1);
            float2* place = partial + t % 2 * (8 * 2 * NT * 2 * 32);
#pragma unroll
            for (int j = 0; j < NT; j++) {
                place[((split * 2 + half_tile) * NT + j) * 64 + lane] = make_float2(c[j][0], c[j][1]);
                place[((split * 2 + half_tile) * NT + j) * 64 + 32 + lane] = make_float2(c[j][2], c[j][3]);
            }
            block_sync();
            profile.mark(2);
            if (pointwise) {
                carry[0] = straight[0], carry[1] = straight[1];
#pragma unroll
                for (int s = 0; s < 8; s++) {
                    float2 v = place[((s * 2 + w / 2) * NT + g) * 64 + w % 2 * 32 + lane];
                    carry[0] += v.x, carry[1] += v.y;
                }
            }
        }
        if (pointwise && real)
#pragma unroll
            for (int r = 0; r < 2; r++)
                if (b0 + r < B) a.dh0[(i64)(b0 + r) * N + unit] = carry[r];
        block_sync();  // the next tile reuses the sums' memory
    }
    profile.save(a.profile);
}
