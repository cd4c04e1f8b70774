// The scan's gradient in one launch, from the last step to the first. The weights' gradient is one product afterwards.
//
// Step t: from dL/dh(t) and the saved gates and row scalars, exchange three row sums (four where eps and tau are
// opposite), then publish the gates' gradient; gather the tile's, multiply by the block's columns of the weights,
// add up over the warps: dL/dh(t-1) of the block's units. Everything between the sums is linear in dL/dh(t), so the
// sum for eta's normalisation need not be known before the two of the rotation.

#define INNER (GATES * NP)
#define STEPS (INNER / 128)  // k-steps of 16 a warp: eight splits of the inner axis
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
    i64 T, B, N, tiles, groups, keep_below;
    double eta, zoneout;
};

KERNEL rum_persistent_backward(const BackwardArgs a) {
    const int g = THREAD / 128, thread = THREAD % 128, w = thread / 32, lane = THREAD % 32, i = lane / 4, q = lane % 4;
    const int group = BLOCK / GROUP, cta = BLOCK % GROUP, T = (int)a.T, B = (int)a.B, N = (int)a.N;
    const int unit = cta * UNITS + 8 * w + i, pair = cta * UNITS + 8 * w + 2 * q;
    const int split = 2 * g + w / 2, half_tile = w % 2;
    const bool real = unit < N, pointwise = g < NT;

    char* grad_bytes = shared_memory();
    float2* partial = (float2*)(grad_bytes + INNER * ROWS * 2);  // [2][8 splits][2 tiles][NT][2 halves][32 lanes]
    float* sums = (float*)(partial + 2 * 8 * 2 * NT * 2 * 32) + g * 320;  // this warpgroup's two [4][32] and a [8][8]

    u32 weight[STEPS][4];
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int inner = split * (INNER / 8) + s * 16 + k / 2 * 8 + 2 * q, column = cta * UNITS + half_tile * 16 + k % 2 * 8 + i;
            int block = inner / NP, row = inner % NP;
            const u16* at = a.weight + ((i64)block * N + row) * N + column;
            weight[s][k] = (column < N && row < N ? at[0] : 0u) | (column < N && row + 1 < N ? (u32)at[N] << 16 : 0u);
        }

    for (int tile = group; tile < (int)a.tiles; tile += (int)a.groups) {
        const int b0 = tile * ROWS + 8 * g + 2 * q, b_load = tile * ROWS + 8 * g + i;
        const bool inside = pointwise && b_load < B;
        const int core_word = ((cta * 4 + w) * ROWS + 8 * g) * 4 + lane;
        float carry[2] = {0.f, 0.f};
        int length[2] = {T, T};
        u32 x_tau = 0, x_u = 0, x_eps = 0, x_h = 0, x_grad = 0;
        float x_stat = 0.f;

        auto load_inputs = [&](int t) {
            const i64 row = (i64)t * B + b_load;
            x_grad = load_pair(a.grad_out + row * N, pair, N, inside);
            x_tau = load_pair(a.gates + row * GATES * N, pair, N, inside);
            if (GATES == 2) x_u = load_pair(a.gates + (row * GATES + 1) * N, pair, N, inside);
            x_eps = load_pair(a.xp + (row * (GATES + 1) + GATES) * N, pair, N, inside);
            if (t > 0)
                x_h = load_pair(a.out + (row - B) * N, pair, N, inside);
            else
                x_h = inside && pair < N ? pack(a.h0[(i64)b_load * N + pair], pair + 1 < N ? a.h0[(i64)b_load * N + pair + 1] : 0.f) : 0u;
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
            u32* grads = a.grads + ((i64)t * a.tiles + tile) * TILE_WORDS;
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
                        mirror = half_turn_of(eps_row, N, turn);
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
                    const float share = share_of_new(key, (i64)(b0 + r) * N + unit, (u32)a.keep_below, (float)a.zoneout);
                    grad2[r] = share * grad[r];
                    straight[r] = (1.f - share) * grad[r];
                    v[4 * r] = mixed[r] * grad2[r];
                    v[4 * r + 1] = rate[r] * grad2[r] * eps[r] * turn.inv_eps;
                    v[4 * r + 2] = rate[r] * grad2[r] * tau[r] * turn.inv_tau;
                    v[4 * r + 3] = turn.opposite && unit == mirror_unit[r] ? rate[r] * grad2[r] : 0.f;
                }
                float* board = a.early + (((i64)t * a.tiles + tile) * NT + g) * BOARD;
                publish_sums(v, sums, board, g, cta, thread);
                {
                    Quad packets[PASSES];
                    peek_sums(packets, board, thread);
                    add_sums(packets, sums + 128, board, thread);
                    warpgroup_sync(g);
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
                u16* row = a.dxp + ((i64)t * B + b_load) * (GATES + 1) * N;
                u32 o_u = 0;
                if (GATES == 2) {
                    o_u = transpose(pack(d_u[0], d_u[1]));
                    publish_word(grads + NP * ROWS / 2 + core_word, o_u);
                }
                store_pair(row, pair, N, inside, o_tau);
                if (GATES == 2) store_pair(row + N, pair, N, inside, o_u);
                store_pair(row + GATES * N, pair, N, inside, transpose(pack(d_eps[0], d_eps[1])));
            }

            gather<INNER * ROWS / 32>(grad_bytes + g * QUARTER_BYTES, grads + g * (QUARTER_BYTES / 4), thread);
            warpgroup_sync(g);
            float c[NT][4];
#pragma unroll
            for (int j = 0; j < NT; j++)
#pragma unroll
                for (int k = 0; k < 4; k++) c[j][k] = 0.f;
            const char* quarter = grad_bytes + split * (QUARTER_BYTES / 2);
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                const char *low = quarter + s * ROWS * 32, *high = low + ROWS * 16;
#pragma unroll
                for (int j = 0; j + 1 < NT; j += 2) {
                    u32 b[4];
                    load_cores4(b, low + j * 128, high + j * 128, low + j * 128 + 128, high + j * 128 + 128);
                    mma(c[j], weight[s], b[0], b[1]);
                    mma(c[j + 1], weight[s], b[2], b[3]);
                }
                if (NT % 2) {
                    u32 b0, b1;
                    load_cores2(b0, b1, low + (NT - 1) * 128, high + (NT - 1) * 128);
                    mma(c[NT - 1], weight[s], b0, b1);
                }
            }
            float2* place = partial + t % 2 * (8 * 2 * NT * 2 * 32);
#pragma unroll
            for (int j = 0; j < NT; j++) {
                place[((split * 2 + half_tile) * NT + j) * 64 + lane] = make_float2(c[j][0], c[j][1]);
                place[((split * 2 + half_tile) * NT + j) * 64 + 32 + lane] = make_float2(c[j][2], c[j][3]);
            }
            block_sync();
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
}
