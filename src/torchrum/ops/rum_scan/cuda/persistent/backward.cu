// The scan's gradient in one launch, from the last step to the first. The weights' gradient is one matmul afterwards.
//
// Step t: from dL/dh(t) and the saved gates and row scalars, exchange three row sums (four where eps and tau are
// opposite), then publish the gates' gradient; gather the tile's, multiply by the block's columns of the weights,
// add up over the warps: dL/dh(t-1) of the block's units. Everything between the sums is linear in dL/dh(t), so the
// sum for eta's normalisation need not be known before the two of the rotation.

#define INNER (GATES * NP)
#define TILE_WORDS (INNER * ROWS * SIZE / 4)
#define QUARTER_BYTES (INNER / 4 * ROWS * SIZE)
#define SUMS_BIAS (STEPS + 2 <= MAX_RESIDENT)  // whether weights leave registers for the sums; Plan.sums_bias
#define SHARE ((GATES + 1) * UNITS)             // of a block in the gradient of the bias

struct BackwardArgs {
    const Element *bias, *grad_out, *xp, *weight, *out, *gates;  // bias is null where xp has it
    const float *stats, *h0;  // h0 is null for zeros
    const i64 *lengths, *seed;
    Element* dxp;
    float* dh0;      // may be null
    Element* dbias;  // (3N), may be null
    u32* grads;    // (T, tiles, TILE_WORDS): the gates' gradient of each step, laid out as the forward's states
    float* early;  // boards: (T, tiles, NT, BOARD)
#if SUMS_BIAS
    float* shares;  // (groups, GROUP, SHARE)
#endif
    u32* arrivals;  // as the forward's
    i64 T, B, N, tiles, groups, keep_below;
    double eta, zoneout;
};

// k-steps of a stage go to the warpgroup's two pairs of warps in turn.
template <int FIRST>
DEVICE void multiply_stages(float (&c)[ACCUMULATOR_SETS * NT][4], const Weights& weight, Quad (&v)[PIECES], char* grads, const u32* from, int g, int thread) {
    if constexpr (FIRST < STEPS) {
        const int LAST = FIRST + STAGE_STEPS / 2 < STEPS ? FIRST + STAGE_STEPS / 2 : STEPS, at = 2 * FIRST / STAGE_STEPS * STAGE_BYTES;
        finish_stage<2 * (STEPS - FIRST)>(v, grads + at, from + at / 4, thread);
        warpgroup_sync(g);
        if constexpr (LAST < STEPS) peek_stage<2 * (STEPS - LAST)>(v, from + (at + STAGE_BYTES) / 4, thread);
        const Cores cores = cores_at(grads + (thread >> 6) * (ROWS * 32));
#pragma unroll
        for (int s = FIRST; s < LAST; s++) multiply_step(c, weight.get(s).a, cores, 2 * s * ROWS * 32);
        multiply_stages<LAST>(c, weight, v, grads, from, g, thread);
    }
}

#if SUMS_BIAS
// The gradient of the bias from each lane's sums over steps, of its units of tau, u and eps. Blocks of the first group add
// up the shares of all groups, warp by warp, always in the same order. `scratch` is [NT + 16][SHARE].
DEVICE void sum_bias(float (&sums)[GATES + 1][2], const BackwardArgs& a, float* scratch, int group, int cta) {
    const int warp = THREAD >> 5, lane = THREAD & 31;
    float* totals = scratch + NT * SHARE;
#pragma unroll
    for (int n = 0; n < GATES + 1; n++)
#pragma unroll
        for (int k = 0; k < 2; k++) {
            for (int mask = 4; mask < 32; mask *= 2) sums[n][k] += shuffle_xor(sums[n][k], mask);  // over eight rows
            if (lane < 4 && warp < 4 * NT) scratch[warp / 4 * SHARE + n * UNITS + warp % 4 * 8 + 2 * lane + k] = sums[n][k];
        }
    block_sync();
    if (THREAD < SHARE) {
        float share = scratch[THREAD];
        for (int j = 1; j < NT; j++) share += scratch[j * SHARE + THREAD];
        publish_float(a.shares + (group * GROUP + cta) * SHARE + THREAD, share);
    }
    if (group > 0) return;

    const bool mine = lane < SHARE / 4;
    float total[4] = {0.f, 0.f, 0.f, 0.f};
    int spins = 0;
    for (int other = warp; other < (int)a.groups; other += 16) {
        u32* from = (u32*)a.shares + (other * GROUP + cta) * SHARE + lane * 4;
        Quad v = {0, 0, 0, 0};
        if (mine) v = peek(from);
        while (!all_lanes(!mine || arrived(v))) {
            spin_once(spins);
            if (mine) v = peek(from);
        }
        total[0] += as_float(v.x), total[1] += as_float(v.y), total[2] += as_float(v.z), total[3] += as_float(v.w);
        if (mine && a.arrivals) clear_quad(from);  // nobody else reads it
    }
    if (mine)
        for (int k = 0; k < 4; k++) totals[warp * SHARE + lane * 4 + k] = total[k];
    block_sync();
    if (THREAD < SHARE / 2) {
        const int N = (int)a.N, input = THREAD / (UNITS / 2), unit = cta * UNITS + THREAD % (UNITS / 2) * 2;
        float x = 0.f, y = 0.f;
        for (int j = 0; j < 16; j++) x += totals[j * SHARE + 2 * THREAD], y += totals[j * SHARE + 2 * THREAD + 1];
        store_pair(a.dbias + input * N + unit, pair_count(unit, N), pack(x, y));
    }
}
#endif

KERNEL rum_persistent_backward(const BackwardArgs a) {
    const int g = THREAD >> 7, thread = THREAD & 127, w = thread >> 5, lane = THREAD & 31, i = lane >> 2, q = lane & 3;
    const int group = (u32)BLOCK / GROUP, cta = (u32)BLOCK % GROUP, T = (int)a.T, B = (int)a.B, N = (int)a.N;
    const int first = cta * UNITS + 8 * w + 2 * q;  // this lane's first unit
    const int split = 2 * g + (w >> 1), half_tile = w & 1;
    const bool pointwise = g < NT;

    char* grad_bytes = shared_memory();
    // [8 splits][2 tiles][NT][2 halves][32 lanes]. One set is enough: the next step's is written when the gates'
    // gradients of all rows have come, and those need sums that this block publishes after reading.
    float2* partial = (float2*)(grad_bytes + INNER * ROWS * SIZE);
    float* sums = (float*)(partial + 8 * 2 * NT * 2 * 32) + g * 320;  // this warpgroup's two [4][32] and a [8][8]

    Weights weight;
    weight.extra = (Quad*)(sums - g * 320 + 4 * 320);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        Fragment f;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int inner = g * (INNER / 4) + (2 * s + w / 2) * K_STEP + k / 2 * (K_STEP / 2) + (WIDE ? 1 : 2) * q;
            const int column = cta * UNITS + half_tile * 16 + k % 2 * 8 + i, block = inner / NP, row = inner % NP;
            const Element* at = a.weight + ((i64)block * N + row) * N + column;
#if WIDE
            f.a[k] = as_weight(column < N && row < N ? at[0] : 0.f);
#else
            f.a[k] = (column < N && row < N ? at[0] : 0u) | (column < N && row + 1 < N ? (u32)at[N] << 16 : 0u);
#endif
        }
        weight.set(s, f);
    }

#if SUMS_BIAS
    float bias_sums[GATES + 1][2] = {};
#endif
    for (int tile = group; tile < (int)a.tiles; tile += (int)a.groups) {
        const int b = tile * ROWS + 8 * g + i;
        const bool inside = pointwise && b < B;
        const int count = inside ? pair_count(first, N) : 0;
        const int grad_word = word_of_pair(cta * 4 + w, 8 * g, lane);
        float carry[2] = {0.f, 0.f};
        int length = T;
        Pair x_tau = {}, x_u = {}, x_eps = {}, x_h = {}, x_grad = {};
        float x_stat = 0.f;

        auto load_inputs = [&](int t) {
            const int state_at = b * N + first, gates_at = b * GATES * N + first;
            x_grad = load_pair(a.grad_out + (i64)t * (B * N) + state_at, count);
            const Element* gates = a.gates + (i64)t * (B * GATES * N) + gates_at;
            x_tau = load_pair(gates, count);
            if (GATES == 2) x_u = load_pair(gates + N, count);
            x_eps = load_pair(a.xp + (i64)t * (B * (GATES + 1) * N) + (b * (GATES + 1) * N + GATES * N + first), count);
            if (t > 0)
                x_h = load_pair(a.out + (i64)(t - 1) * (B * N) + state_at, count);
            else
                x_h = count && a.h0 ? pack(a.h0[state_at], count == 2 ? a.h0[state_at + 1] : 0.f) : Pair();
            const int stat_row = tile * ROWS + 8 * g + (thread >> 3);
            if (thread < 64) x_stat = stat_row < B ? a.stats[((i64)t * B + stat_row) * 8 + (thread & 7)] : 0.f;
        };
        if (pointwise) {
            load_inputs(T - 1);
            if (LENGTHS && inside) length = (int)a.lengths[b];
        }

        for (int t = T - 1; t >= 0; t--) {
            u32* grads = a.grads + (i64)(t * (int)a.tiles + tile) * TILE_WORDS;
            float direct_grad[2] = {0.f, 0.f};  // what reaches h(t-1) outside the matmul
            if (pointwise) {
                if (thread < 64) sums[256 + thread] = x_stat;
                if (a.bias) x_eps = sum_of(x_eps, load_pair(a.bias + GATES * N + first, count));
                const float tau[2] = {low_of(x_tau), high_of(x_tau)}, eps[2] = {low_of(x_eps), high_of(x_eps)};
                const float h[2] = {low_of(x_h), high_of(x_h)};
                const float u[2] = {GATES == 2 ? sigmoid(low_of(x_u)) : 0.f, GATES == 2 ? sigmoid(high_of(x_u)) : 0.f};
                const float grad[2] = {carry[0] + low_of(x_grad), carry[1] + high_of(x_grad)};
                const u32 key = ZONEOUT == 2 ? hash32((u32)a.seed[0] ^ (u32)t * 0x9E3779B9u) : 0;
                warpgroup_sync(g);
                const float* stat = sums + 256 + i * 8;
                const Rotation rotation = rotation_of(stat[0], stat[1], stat[2], stat[3], stat[4]);
                HalfTurn mirror = {0, 0.f, 0.f, 0.f};
                float mirror_flow = 0.f;
                if (rotation.opposite) {
                    const i64 row = (i64)t * B + b;
                    const Element *eps_row = a.xp + (row * (GATES + 1) + GATES) * N, *eps_bias = a.bias ? a.bias + GATES * N : 0;
                    mirror = half_turn_of(eps_row, eps_bias, N, rotation.inv_eps);
                    const int m = mirror.unit;
                    const float mirror_h = t > 0 ? to_float(a.out[(row - B) * N + m]) : a.h0 ? a.h0[(i64)b * N + m] : 0.f;
                    mirror.along = (mirror_h - mirror.e_i * rotation.p) * mirror.inv_norm;
                    const float e = eps_at(eps_row, eps_bias, m), x = e + rotated_h(rotation, mirror, m, e, 0.f, mirror_h), z = activate(x);
                    const float gate = GATES == 2 ? sigmoid(to_float(a.gates[(row * GATES + 1) * N + m])) : 0.f;
                    mirror_flow = slope(x, z) * (1.f - gate) * (gate * mirror_h + (1.f - gate) * z);
                }
                float v[4] = {0.f, 0.f, 0.f, 0.f}, y[2], rate[2], mixed[2], grad2[2];
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const bool real = first + k < N;
                    const float x = eps[k] + rotated_h(rotation, mirror, first + k, eps[k], tau[k], h[k]);
                    y[k] = activate(x);
                    rate[k] = real ? slope(x, y[k]) * (1.f - u[k]) : 0.f;
                    mixed[k] = real ? u[k] * h[k] + (1.f - u[k]) * y[k] : 0.f;
                    const float share = share_of_new(key, (u32)b * (u32)N + first + k, (u32)a.keep_below, (float)a.zoneout);
                    grad2[k] = share * grad[k];
                    direct_grad[k] = ZONEOUT ? (1.f - share) * grad[k] : 0.f;
                    const float flow = rate[k] * grad2[k];
                    if (ETA) v[0] += mixed[k] * grad2[k];
                    v[1] += flow * eps[k], v[2] += flow * second_of(rotation, eps[k], tau[k]);
                    if (rotation.opposite && first + k == mirror.unit) v[3] = flow;
                }
                float* board = a.early + (i64)(t * (int)a.tiles + tile) * (NT * BOARD) + g * BOARD;
                publish_sums(v, sums, board, g, cta, thread);
                if ((lane == 0 || (WIDE && lane == 2)) && t >= PREFETCH_STEPS) {
                    const i64 later = (i64)PREFETCH_STEPS * a.tiles;
                    prefetch_line(grads - later * TILE_WORDS + grad_word);
                    if (GATES == 2) prefetch_line(grads - later * TILE_WORDS + TILE_WORDS / 2 + grad_word);
                    if (w == 0 && (!WIDE || lane == 0)) prefetch_line(board - later * (NT * BOARD) + cta * 32);
                }
                if (t > 0) load_inputs(t - 1);
                {
                    Quad packets[PASSES];
                    peek_sums(packets, board, thread);
                    add_sums(packets, sums + 128, board, thread);
                    warpgroup_sync(g);
                }
                float s[4], scale = 1.f, along = 0.f;
                read_sums(s, sums + 128, i);
                const float by_second = WIDE && rotation.narrow ? 1.f : rotation.inv_tau;
                float A = s[1] * rotation.inv_eps, C = s[2] * by_second, at_mirror = s[3];
                if (ETA) {
                    const float inv = stat[5] * stat[5] <= TINY ? 0.f : 1.f / stat[5];
                    scale = (float)a.eta * inv, along = s[0] * inv * inv;
                    A = scale * (A - along * rotation.inv_eps * stat[6]);
                    C = scale * (C - along * by_second * stat[7]);
                    at_mirror = scale * (at_mirror - along * mirror_flow);
                }
                // The rotation's gradient: each of dh, d tau and d eps is a combination of dz, h, eps and tau.
#if WIDE
                const float both = rotation.narrow ? C : A + C;
                if (rotation.narrow) C -= A;
                const float dq = -rotation.k * both, dp = 2.f * C + dq, dc = -rotation.k * rotation.coef_eps * both;
#else
                const float dp = (2.f - rotation.k) * C - rotation.k * A, dq = -rotation.k * (A + C);
                const float dc = rotation.k * rotation.k * (rotation.p + rotation.q) * (A + C);
#endif
                const float tau_tau = rotation.coef_tau * C + dq * rotation.q + dc * rotation.c, eps_eps = rotation.coef_eps * A + dp * rotation.p + dc * rotation.c;
                float d_tau[2], d_u[2], d_eps[2];
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const bool real = first + k < N;
                    const float d_mixed = ETA ? scale * (grad2[k] - along * mixed[k]) : grad2[k];
                    const float dz = rate[k] * d_mixed, e = eps[k] * rotation.inv_eps, n = tau[k] * rotation.inv_tau;
                    d_u[k] = d_mixed * (h[k] - y[k]) * u[k] * (1.f - u[k]);
                    direct_grad[k] += d_mixed * u[k];
                    if (rotation.opposite) {  // two fixed mirrors for tau and h; eps moves the first
                        const float f = ((first + k == mirror.unit ? 1.f : 0.f) - mirror.e_i * e) * mirror.inv_norm;
                        const float back = dz - 2.f * (at_mirror - mirror.e_i * A) * mirror.inv_norm * f;
                        d_tau[k] = 0.f;
                        d_eps[k] = dz + rotation.inv_eps * (-2.f * (rotation.p * back + A * h[k]) + 4.f * rotation.p * A * e);
                        direct_grad[k] += back - 2.f * A * e;
                    } else {
                        direct_grad[k] += dz + dp * e + dq * n;
                        d_tau[k] = rotation.inv_tau * (rotation.coef_tau * dz + dq * h[k] + dc * e - tau_tau * n);
                        d_eps[k] = dz + rotation.inv_eps * (rotation.coef_eps * dz + dp * h[k] + dc * n - eps_eps * e);
                    }
                    if (t >= length) d_tau[k] = d_u[k] = d_eps[k] = 0.f, direct_grad[k] = grad[k];
                    if (!real) d_tau[k] = d_u[k] = d_eps[k] = direct_grad[k] = 0.f;
#if SUMS_BIAS
                    if (inside) {
                        bias_sums[0][k] += d_tau[k], bias_sums[GATES][k] += d_eps[k];
                        if (GATES == 2) bias_sums[1][k] += d_u[k];
                    }
#endif
                }
                const Pair o_tau = pack(d_tau[0], d_tau[1]), o_u = GATES == 2 ? pack(d_u[0], d_u[1]) : Pair();
                publish_pair(grads + grad_word, o_tau);
                if (GATES == 2) publish_pair(grads + TILE_WORDS / 2 + grad_word, o_u);
                Element* row = a.dxp + (i64)t * (B * (GATES + 1) * N) + (b * (GATES + 1) * N + first);
                store_pair(row, count, o_tau);
                if (GATES == 2) store_pair(row + N, count, o_u);
                store_pair(row + GATES * N, count, pack(d_eps[0], d_eps[1]));
            }

            Quad v_grads[PIECES];
            const u32* from = grads + g * (QUARTER_BYTES / 4);
            peek_stage<2 * STEPS>(v_grads, from, thread);
            float c[ACCUMULATOR_SETS * NT][4];
            clear(c);
            multiply_stages<0>(c, weight, v_grads, grad_bytes + g * QUARTER_BYTES, from, g, thread);
            merge_accumulators(c);
#pragma unroll
            for (int j = 0; j < NT; j++) {
                partial[((split * 2 + half_tile) * NT + j) * 64 + lane] = make_float2(c[j][0], c[j][1]);
                partial[((split * 2 + half_tile) * NT + j) * 64 + 32 + lane] = make_float2(c[j][2], c[j][3]);
            }
            block_sync();
            if (pointwise) {
                carry[0] = carry[1] = 0.f;
#pragma unroll
                for (int s = 0; s < 8; s++) {
                    float2 v = partial[((s * 2 + (w >> 1)) * NT + g) * 64 + half_tile * 32 + lane];
                    carry[0] += v.x, carry[1] += v.y;
                }
                transpose(carry[0], carry[1]);
                carry[0] += direct_grad[0], carry[1] += direct_grad[1];
            }
        }
        if (a.dh0 && count > 0) a.dh0[b * N + first] = carry[0];
        if (a.dh0 && count > 1) a.dh0[b * N + first + 1] = carry[1];
        if (a.arrivals && is_last_reader(a.arrivals + tile)) {
            clear_mailboxes(a.grads, T, TILE_WORDS, (int)a.tiles, tile);
            clear_mailboxes((u32*)a.early, T, NT * BOARD, (int)a.tiles, tile);
        }
        block_sync();  // the next tile reuses the sums' memory
    }
#if SUMS_BIAS
    if (a.dbias) sum_bias(bias_sums, a, (float*)partial, group, cta);
#endif
}
