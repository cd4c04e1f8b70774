// The raw gates of all steps, xp + W_hh h_{t-1}. The forward does not keep them: here they are computed once more, in the
// same order of operations, for the backward and the replay. A block takes `share` of the T * B rows; its warps go their
// own way, since each has its rows of W_hh in registers and copies the states for itself.

constexpr int STATES_AT_ONCE = 2;  // states at a time, so that one's sums can wait for the other's

extern "C" __global__ void __launch_bounds__(THREADS, 1) lam1_gates(
    const io_t* xp, const float* bias, const float* h0, const float* weight, const io_t* out, float* gates, int T, int B,
    int share) {
    SHARED_MEMORY(shared);
    const ThreadPosition p = thread_position();
    const int lane = p.lane;
    float* own = shared + p.warp * STATES_AT_ONCE * NV;
    static_assert(STATES_AT_ONCE * NV * WARPS <= SHARED_FLOATS, "shared memory");

    Tile W_tau, W_u;
    load_tile(W_tau, weight, N, 1, p);
    if (GATES == 2) load_tile(W_u, weight + N * N, N, 1, p);
    const i64 all = (i64)T * B, first = (i64)blockIdx.x * share, last = first + share < all ? first + share : all;

    Vector state[STATES_AT_ONCE];  // h_{t-1} as it enters the matmul with W_hh
    auto fetch = [&](i64 at) {
        UNROLL for (int s = 0; s < STATES_AT_ONCE; ++s) EACH(i) {
            const int j = 32 * i + lane;
            float x = 0.f;
            if (at + s < last && inside(i, lane)) {
                if (at + s >= B) x = load(out, (at + s - B) * N + j);
                else if (h0) x = rounded(h0[(at + s) * N + j]);
            }
            state[s].x[i] = x;
        }
    };
    fetch(first);
    for (i64 at = first; at < last; at += STATES_AT_ONCE) {
        __syncwarp();
        UNROLL for (int s = 0; s < STATES_AT_ONCE; ++s) write(own + s * NV, state[s], lane);
        __syncwarp();
        fetch(at + STATES_AT_ONCE);
        float x[STATES_AT_ONCE][GATES];
        bool mine[STATES_AT_ONCE];
        UNROLL for (int s = 0; s < STATES_AT_ONCE; ++s) {
            mine[s] = p.owner && p.own < N && at + s < last;
            UNROLL for (int g = 0; g < GATES; ++g)
                x[s][g] = mine[s] ? with_bias(load(xp, (at + s) * INPUTS * N + g * N + p.own), bias, g * N + p.own) : 0.f;
        }
        Rows s_tau[STATES_AT_ONCE] = {}, s_u[STATES_AT_ONCE] = {};
        UNROLL for (int k = 0; k < CHUNKS; ++k) UNROLL for (int s = 0; s < STATES_AT_ONCE; ++s) {
            const Chunk h = chunk(own + s * NV, k, p.segment);
            multiply(s_tau[s], W_tau, k, h);
            if (GATES == 2) multiply(s_u[s], W_u, k, h);
        }
        UNROLL for (int s = 0; s < STATES_AT_ONCE; ++s) {
            const float row_tau = reduce_rows(s_tau[s], p.segment);
            const float row_u = GATES == 2 ? reduce_rows(s_u[s], p.segment) : 0.f;
            if (!mine[s]) continue;
            float* to = gates + (at + s) * GATE_STRIDE + p.own;
            to[0] = row_tau + x[s][0];
            if (GATES == 2) to[N] = row_u + x[s][GATES - 1];
        }
    }
}
