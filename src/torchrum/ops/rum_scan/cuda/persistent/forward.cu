// The whole lam = 0 scan in one launch. Compile-time: NP, NT, GATES, ACTIVATION, HALF_BF16, WIDE, TF32X3, ETA, ZONEOUT,
// LENGTHS, EVEN, WGMMA.
//
// Step t: gather h(t-1) of the tile, multiply, add up over the warpgroups; exchange four row sums; rotate, mix, publish
// h(t). The norm for eta travels beside h(t) and is applied by its readers (`DEFER`), unless zoneout needs it first.

#define DEFER (ETA && ZONEOUT == 0)
#define TILE_WORDS (NP * ROWS * SIZE / 4)  // one step's h, as [unit / 8][row][unit % 8] 16-bit or [unit / 4][row][unit % 4] float32 numbers
#define QUARTER_BYTES (NP / 4 * ROWS * SIZE)

struct ForwardArgs {
    Element* xp;
    const Element *bias, *weight, *x, *weight_ih;  // bias is null where xp has it, x where xp is there
    const float* h0;  // null for zeros
    const i64 *lengths, *seed;
    Element *out, *last_copy, *out_copy, *gates;  // all but out may be null, and stats too
    float* stats;  // (T, B, 8): |eps|^2, |tau|^2, eps.tau, tau.h (WIDE: of the Bisector), eps.h, |h1|, then two sums for eta's gradient
    u32* states;   // (T, tiles, TILE_WORDS), slot t holds h(t-1)
    float *early, *late;  // boards: (T, tiles, NT, BOARD) and (T + 1, tiles, NT, BOARD)
#if WIDE
    float* narrow;  // boards as early's, used where eps and tau are nearly opposite
#endif
    u32* arrivals;  // (tiles), for mailboxes that the launch clears; null where they were filled for this launch only
    i64 T, B, N, tiles, groups, keep_below;
    double eta, zoneout;
    i64 features;  // of x
};

#if WGMMA && !defined(EMULATE)
#define WGMMA_HEAD(n) "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." HALF_NAME "." HALF_NAME " "
#define WGMMA_IN "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
#define C4(j) "+f"(c[j][0]), "+f"(c[j][1]), "+f"(c[j][2]), "+f"(c[j][3])
DEVICE void warpgroup_mma(float (&c)[NT][4], const u32 (&a)[4], u64 b) {
#if NT == 1
    asm volatile(WGMMA_HEAD("8") "{%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;" : C4(0) : WGMMA_IN);
#elif NT == 2
    asm volatile(WGMMA_HEAD("16") "{%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
                 : C4(0), C4(1) : WGMMA_IN);
#elif NT == 3
    asm volatile(WGMMA_HEAD("24") "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}, {%12, %13, %14, %15}, %16, 1, 1, 1, 0;"
                 : C4(0), C4(1), C4(2) : WGMMA_IN);
#else
    asm volatile(WGMMA_HEAD("32") "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
                 "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;" : C4(0), C4(1), C4(2), C4(3) : WGMMA_IN);
#endif
}
#endif

// c[j] += W slice (16 rows of a warp) x h (8 rows of tile j), over k-steps FIRST to LAST - 1 of the warpgroup's quarter.
template <int FIRST, int LAST>
DEVICE void multiply(float (&c)[ACCUMULATOR_SETS * NT][4], const Weights& weight, const char* h) {
#if WGMMA && !defined(EMULATE)
    // Core matrices of 128 bytes; the next eight rows follow at 128 bytes, the next eight units at ROWS * 16.
    u64 base = (u64)(shared_address(h) >> 4) | (u64)ROWS << 16 | (u64)8 << 32;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int s = FIRST; s < LAST; s++) warpgroup_mma(c, weight.get(s).a, base + s * 2 * ROWS);
    asm volatile("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;" ::: "memory");
#else
    const Cores at = cores_at(h);
#pragma unroll
    for (int s = FIRST; s < LAST; s++) multiply_step(c, weight.get(s).a, at, s * ROWS * 32);
#endif
}

// `on_last_stage` is called when the last stage has arrived: what it asks for travels during the last matmul.
template <int FIRST, class Callback>
DEVICE void multiply_stages(float (&c)[ACCUMULATOR_SETS * NT][4], const Weights& weight, Quad (&v)[PIECES], char* h, const u32* from, int g, int thread,
                            const Callback& on_last_stage) {
    if constexpr (FIRST < STEPS) {
        const int LAST = FIRST + STAGE_STEPS < STEPS ? FIRST + STAGE_STEPS : STEPS, at = FIRST / STAGE_STEPS * STAGE_BYTES;
        finish_stage<STEPS - FIRST>(v, h + at, from + at / 4, thread);
#if WGMMA && !defined(EMULATE)
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
        warpgroup_sync(g);
        if constexpr (LAST < STEPS) peek_stage<STEPS - LAST>(v, from + (at + STAGE_BYTES) / 4, thread);
        else on_last_stage();
        multiply<FIRST, LAST>(c, weight, h);
        multiply_stages<LAST>(c, weight, v, h, from, g, thread, on_last_stage);
    }
}

#if WIDE
// xp of the block's units for one tile, without the bias: a small matmul of its own would cost the host a launch. Four
// lanes share a number.
DEVICE void project(const ForwardArgs& a, int tile, int cta) {
    const int B = (int)a.B, N = (int)a.N, I = (int)a.features, begin = tile * ROWS, rows = B - begin < ROWS ? B - begin : ROWS;
    const int columns = (GATES + 1) * UNITS, numbers = (int)a.T * rows * columns;  // a multiple of 32: warps stay whole
    for (int n = THREAD >> 2; n < numbers; n += 128) {
        const int block = n % columns / UNITS, unit = cta * UNITS + n % UNITS, row = n / columns;
        const i64 at = (i64)(row / rows) * B + begin + row % rows;  // among all T * B
        const float *x = a.x + at * I, *w = a.weight_ih + (i64)(block * N + unit) * I;
        float sum = 0.f;
        if (unit < N)
            for (int k = THREAD & 3; k < I; k += 4) sum += x[k] * w[k];
        sum += shuffle_xor(sum, 1);
        sum += shuffle_xor(sum, 2);
        if (unit < N && (THREAD & 3) == 0) a.xp[at * ((GATES + 1) * N) + block * N + unit] = sum;
    }
}
#endif

KERNEL rum_persistent_forward(const ForwardArgs a) {
    const int g = THREAD >> 7, thread = THREAD & 127, w = thread >> 5, lane = THREAD & 31, i = lane >> 2, q = lane & 3;
    const int group = (u32)BLOCK / GROUP, cta = (u32)BLOCK % GROUP, T = (int)a.T, B = (int)a.B, N = (int)a.N;
    const int first = cta * UNITS + 8 * w + 2 * q;  // this lane's first unit
    const bool pointwise = g < NT, saves = a.stats && cta == 0 && w == 0 && q == 0;

    char* h_bytes = shared_memory();
    float4* partial = (float4*)(h_bytes + NP * ROWS * SIZE);          // [4 warpgroups][NT][128 threads]; one set is enough, as in the backward
    float* sums = (float*)(partial + 4 * NT * 128) + g * 512;  // this warpgroup's four [4][32]

#if WIDE
    if (a.x) {
        for (int tile = group; tile < (int)a.tiles; tile += (int)a.groups) project(a, tile, cta);
        block_sync();
        fence();  // a half turn reads what other blocks have written; behind the barrier, for the writes of all threads
    }
#endif

    Weights weight;
    weight.extra = (Quad*)(sums - g * 512 + 4 * 512);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        Fragment f;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int unit = cta * UNITS + 8 * w + i;
#if WIDE
            const int k = g * (NP / 4) + s * 8 + half * 4 + q;
            const bool real = unit < N && k < N;
            f.a[2 * half] = as_weight(real ? a.weight[unit * N + k] : 0.f);
            f.a[2 * half + 1] = as_weight(real && GATES == 2 ? a.weight[(N + unit) * N + k] : 0.f);
#else
            const int k = g * (NP / 4) + s * 16 + half * 8 + 2 * q;
            const int count = unit < N ? pair_count(k, N) : 0;
            f.a[2 * half] = load_pair(a.weight + unit * N + k, count);
            f.a[2 * half + 1] = load_pair(a.weight + (N + unit) * N + k, GATES == 2 ? count : 0);
#endif
        }
        weight.set(s, f);
    }

    for (int tile = group; tile < (int)a.tiles; tile += (int)a.groups) {
        const int b = tile * ROWS + 8 * g + i;
        const bool inside = pointwise && b < B;
        const int count = inside ? pair_count(first, N) : 0;
        const int state_word = word_of_pair(cta * 4 + w, 8 * g, lane);
        float h[2] = {0.f, 0.f}, late[4];
        int length = T;
        Pair x_tau = {}, x_u = {}, x_eps = {};

        auto load_inputs = [&](int t) {
            const Element* at = a.xp + (i64)t * (B * (GATES + 1) * N) + (b * (GATES + 1) * N + first);
            x_tau = load_pair(at, count);
            if (GATES == 2) x_u = load_pair(at + N, count);
            x_eps = load_pair(at + GATES * N, count);
        };
        auto add_bias = [&]() {  // to what has come of them
            if (!a.bias) return;
            x_tau = sum_of(x_tau, load_pair(a.bias + first, count));
            if (GATES == 2) x_u = sum_of(x_u, load_pair(a.bias + N + first, count));
            x_eps = sum_of(x_eps, load_pair(a.bias + GATES * N + first, count));
        };
        auto board = [&](float* boards, int t) { return boards + (i64)(t * (int)a.tiles + tile) * (NT * BOARD) + g * BOARD; };
        auto states = [&](int t) { return a.states + (i64)(t * (int)a.tiles + tile) * TILE_WORDS; };
        auto publish_state = [&](int slot) { publish_pair(states(slot) + state_word, pack(h[0], h[1])); };
        auto wait_late = [&](int slot) {
            Quad v[PASSES];
            peek_sums(v, board(a.late, slot), thread);
            add_sums(v, sums + 384, board(a.late, slot), thread);
            warpgroup_sync(g);
            read_sums(late, sums + 384, i);
            warpgroup_sync(g);
        };
        auto scale_of_late = [&]() { return late[0] <= TINY ? 0.f : (float)a.eta * inverse_root(late[0]); };
        auto save_late = [&](int t) {  // |h1| and the gradient sums of step t
            if (saves && inside) {
                float* row = a.stats + ((i64)t * B + b) * 8;
                row[5] = sqrtf(late[0]), row[6] = late[2], row[7] = late[3];
            }
        };
        auto store_out = [&](int t) {
            const i64 at = (i64)t * (B * N) + (b * N + first);
            store_pair(a.out + at, count, pack(h[0], h[1]));
            if (a.out_copy) store_pair(a.out_copy + at, count, pack(h[0], h[1]));
            if (a.last_copy && t == T - 1) store_pair(a.last_copy + (b * N + first), count, pack(h[0], h[1]));
        };

        if (pointwise) {
            if (a.h0 && count > 0) h[0] = a.h0[b * N + first];
            if (a.h0 && count > 1) h[1] = a.h0[b * N + first + 1];
            if (LENGTHS && inside) length = (int)a.lengths[b];
            publish_state(0);
            load_inputs(0);
            add_bias();
            float v[4] = {0.f, low_of(x_eps) * low_of(x_eps) + high_of(x_eps) * high_of(x_eps), 0.f, 0.f};
            publish_sums(v, sums + 256, board(a.late, 0), g, cta, thread);
            if (ETA && !DEFER) wait_late(0);
        }

        for (int t = 0; t < T; t++) {
            Quad v_h[PIECES];
            const u32* from = states(t) + g * (QUARTER_BYTES / 4);
            peek_stage<STEPS>(v_h, from, thread);
            const bool reads_late = pointwise && !(ETA && !DEFER);
            float c[ACCUMULATOR_SETS * NT][4];
            clear(c);
            Quad late_packets[PASSES];
            auto on_last_stage = [&] {
                if (reads_late) peek_sums(late_packets, board(a.late, t), thread);
            };
            multiply_stages<0>(c, weight, v_h, h_bytes + g * QUARTER_BYTES, from, g, thread, on_last_stage);
            merge_accumulators(c);
#pragma unroll
            for (int j = 0; j < NT; j++)
                if (j != g) partial[(g * NT + j) * 128 + thread] = make_float4(c[j][0], c[j][1], c[j][2], c[j][3]);
            if (reads_late) add_sums(late_packets, sums + 384, board(a.late, t), thread);
            block_sync();
            if (!pointwise) continue;

            float tau[2], raw_u[2];
#pragma unroll
            for (int j = 0; j < NT; j++)
                if (j == g) tau[0] = c[j][0], tau[1] = c[j][1], raw_u[0] = c[j][2], raw_u[1] = c[j][3];
#pragma unroll
            for (int other = 1; other < 4; other++) {
                float4 v = partial[(((g + other) & 3) * NT + g) * 128 + thread];
                tau[0] += v.x, tau[1] += v.y, raw_u[0] += v.z, raw_u[1] += v.w;
            }
            transpose(tau[0], tau[1]);
            if (GATES == 2) transpose(raw_u[0], raw_u[1]);
            if (reads_late) read_sums(late, sums + 384, i);
            if (DEFER && t > 0) {
                const float scale = t - 1 < length ? scale_of_late() : 1.f;
#pragma unroll
                for (int k = 0; k < 2; k++) h[k] *= scale, tau[k] *= scale, raw_u[k] *= scale;
            }
            const float eps[2] = {low_of(x_eps), high_of(x_eps)}, ee = late[1];
            tau[0] += low_of(x_tau), tau[1] += high_of(x_tau);
            if (GATES == 2) raw_u[0] += low_of(x_u), raw_u[1] += high_of(x_u);
            {
                float v[4] = {tau[0] * tau[0] + tau[1] * tau[1], eps[0] * tau[0] + eps[1] * tau[1],
                              tau[0] * h[0] + tau[1] * h[1], eps[0] * h[0] + eps[1] * h[1]};
                publish_sums(v, sums, board(a.early, t), g, cta, thread);
            }
            // What nothing waits for, while the sums travel.
            if (WIDE && lane == 2 && t + PREFETCH_STEPS < T) prefetch_line(states(t + PREFETCH_STEPS) + state_word);
            if (lane == 0 && t + PREFETCH_STEPS < T) {
                prefetch_line(states(t + PREFETCH_STEPS) + state_word);
                if (w == 0) prefetch_line(board(a.early, t + PREFETCH_STEPS) + cta * 32);
                if (w == 1) prefetch_line(board(a.late, t + PREFETCH_STEPS) + cta * 32);
            }
            if (t + 1 < T) load_inputs(t + 1);
            if (DEFER && t > 0) {
                store_out(t - 1);
                save_late(t - 1);
            }
            if (a.gates) {
                Element* gates = a.gates + (i64)t * (B * GATES * N) + (b * GATES * N + first);
                store_pair(gates, count, pack(tau[0], tau[1]));
                if (GATES == 2) store_pair(gates + N, count, pack(raw_u[0], raw_u[1]));
            }
            const float u[2] = {GATES == 2 ? sigmoid(raw_u[0]) : 0.f, GATES == 2 ? sigmoid(raw_u[1]) : 0.f};
            float s[4];
            {
                Quad v[PASSES];
                peek_sums(v, board(a.early, t), thread);
                add_sums(v, sums + 128, board(a.early, t), thread);
                warpgroup_sync(g);
                read_sums(s, sums + 128, i);
            }
#if WIDE
            Bisector bisector = bisector_of(ee, s[0], s[1], s[2], s[3]);
            if (any_lane(bisector.square < NARROW)) {  // of the same rows in every block, since all add up in one order
                const float inv_eps = inverse_root(ee), inv_tau = inverse_root(s[0]);
                float v[4] = {0.f, 0.f, 0.f, 0.f}, again[4];
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const float x = eps[k] * inv_eps + tau[k] * inv_tau;
                    v[0] += x * x, v[1] += x * h[k];
                }
                publish_sums(v, sums, board(a.narrow, t), g, cta, thread);
                Quad packets[PASSES];
                peek_sums(packets, board(a.narrow, t), thread);
                add_sums(packets, sums + 128, board(a.narrow, t), thread);
                warpgroup_sync(g);
                read_sums(again, sums + 128, i);
                if (bisector.square < NARROW) bisector = {again[0], again[1]};
            }
            s[1] = bisector.square, s[2] = bisector.along;
#endif

            const Rotation rotation = rotation_of(ee, s[0], s[1], s[2], s[3]);
            HalfTurn mirror = {0, 0.f, 0.f, 0.f};
            if (rotation.opposite) {
                if (WIDE && a.x) fence();
                const Element *eps_row = a.xp + (((i64)t * B + b) * (GATES + 1) + GATES) * N, *eps_bias = a.bias ? a.bias + GATES * N : 0;
                mirror = half_turn_of(eps_row, eps_bias, N, rotation.inv_eps);
                const Quad state = peek(states(t) + (mirror.unit / (16 / SIZE) * ROWS + 8 * g + i) * 4);
                const int byte = mirror.unit % (16 / SIZE) * SIZE;
                const u32 word = byte < 4 ? state.x : byte < 8 ? state.y : byte < 12 ? state.z : state.w;
#if WIDE
                float mirror_h = as_float(word);
#else
                float mirror_h = byte % 4 ? high_of(word) : low_of(word);
#endif
                if (DEFER && t > 0 && t - 1 < length) mirror_h *= scale_of_late();
                mirror.along = (mirror_h - mirror.e_i * rotation.p) * mirror.inv_norm;
            }
            float v[4] = {0.f, 0.f, 0.f, 0.f}, old[2] = {h[0], h[1]};
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const float x = eps[k] + rotated_h(rotation, mirror, first + k, eps[k], tau[k], h[k]), y = activate(x);
                const float mixed = first + k < N ? u[k] * h[k] + (1.f - u[k]) * y : 0.f;
                if (ETA) {
                    const float flow = slope(x, y) * (1.f - u[k]) * mixed;
                    v[0] += mixed * mixed, v[2] += flow * eps[k], v[3] += flow * second_of(rotation, eps[k], tau[k]);
                }
                if (t < length) h[k] = mixed;
            }
            auto publish_late = [&]() {  // what the readers of h(t) need beside it
                if (t + 1 < T) {
                    add_bias();
                    v[1] = low_of(x_eps) * low_of(x_eps) + high_of(x_eps) * high_of(x_eps);
                }
                publish_sums(v, sums + 256, board(a.late, t + 1), g, cta, thread);
            };
            if (ETA && !DEFER) {
                publish_late();
                wait_late(t + 1);
                save_late(t);
            }
            if (ZONEOUT && t < length) {
                const u32 key = ZONEOUT == 2 ? hash32((u32)a.seed[0] ^ (u32)t * 0x9E3779B9u) : 0;
#pragma unroll
                for (int k = 0; k < 2; k++) {
                    const float share = share_of_new(key, (u32)b * (u32)N + first + k, (u32)a.keep_below, (float)a.zoneout);
                    h[k] = share * (ETA ? scale_of_late() : 1.f) * h[k] + (1.f - share) * old[k];
                }
            }
            if (t + 1 < T) publish_state(t + 1);
            if (!(ETA && !DEFER)) publish_late();
            if (!DEFER) store_out(t);
            if (saves && inside) {
                float* row = a.stats + ((i64)t * B + b) * 8;
                row[0] = ee, row[1] = s[0], row[2] = s[1], row[3] = s[2], row[4] = s[3];
            }
        }
        if (DEFER && pointwise) {
            wait_late(T);
            const float scale = T - 1 < length ? scale_of_late() : 1.f;
            h[0] *= scale, h[1] *= scale;
            store_out(T - 1);
            save_late(T - 1);
        }
        if (a.arrivals && is_last_reader(a.arrivals + tile)) {
            clear_mailboxes(a.states, T, TILE_WORDS, (int)a.tiles, tile);
            clear_mailboxes((u32*)a.early, T, NT * BOARD, (int)a.tiles, tile);
            clear_mailboxes((u32*)a.late, T + 1, NT * BOARD, (int)a.tiles, tile);
#if WIDE
            clear_mailboxes((u32*)a.narrow, T, NT * BOARD, (int)a.tiles, tile);
#endif
        }
        block_sync();  // the next tile reuses the sums' memory
    }
}
