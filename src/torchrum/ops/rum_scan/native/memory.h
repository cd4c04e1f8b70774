/* The memory of lam = 1: one row's R, turned by two rank-1 updates per step, and its gradients; as ../torch_rotation.py, without
 * its windows: R is formed at every step, since a row's R stays in the cache. */
#ifndef TORCHRUM_MEMORY_H
#define TORCHRUM_MEMORY_H

#include "rotate.h"

/* Where a step turns: R <- R H_e H_n. e and n are zero where nothing turns. */
typedef struct {
    real *e, *n;  /* two consecutive padded rows; a third one behind them takes h */
    real *w;      /* tau's direction */
    real inv_eps; /* 1/|eps| */
    real inv_s;   /* 1/|e + w|; 0 where the bisector has no gradient */
    real inv_tau;
} Plane;

static void find_plane(const Shared *shared, const Row *row, Plane *plane)
{
    const int64_t padded = shared->padded;
    real *e = plane->e, *n = plane->n, *w = plane->w;
    plane->inv_eps = inverse_of(length_of(row->eps, dot(row->eps, row->eps, padded), padded));
    plane->inv_tau = inverse_of(length_of(row->tau, dot(row->tau, row->tau, padded), padded));
    plane->inv_s = 0;
    if (plane->inv_eps == 0 || plane->inv_tau == 0 || shared->scan->H == 1) { /* not so for NaN */
        memset(e, 0, padded * sizeof(real));
        memset(n, 0, padded * sizeof(real));
        memset(w, 0, padded * sizeof(real));
        plane->inv_eps = plane->inv_tau = 0;
        return;
    }
    vec squares = {0};
    for (int64_t j = 0; j < padded; j += LANES) {
        vec from = load(row->eps + j) * plane->inv_eps, to = load(row->tau + j) * plane->inv_tau;
        store(e + j, from);
        store(w + j, to);
        squares += (from + to) * (from + to);
    }
    real square = total_of(squares);
    if (square <= (real)OPPOSITE * (real)OPPOSITE) { /* a half turn about a constant plane: n = m, orthogonal to e */
        orthogonal_to(e, n, shared->scan->H, padded);
        plane->inv_tau = 0;
        return;
    }
    plane->inv_s = 1 / square_root(square);
    for (int64_t j = 0; j < padded; j += LANES) /* n = H_e m, and e.s = s.s/2 */
        store(n + j, (load(e + j) * (1 - square) + load(w + j)) * plane->inv_s);
}

#define CHUNK 4 /* vectors of columns that a pass over a matrix holds in registers */

/* CALL(W, HALF) for a chunk of W vectors, and of half a one if HALF, constants, out of the last ``left`` ones of a row
 * that ends in half a vector if ``half``. */
#define WITH_WIDTH(left, half, CALL)                                                                                   \
    do {                                                                                                               \
        if ((left) > 4 || ((left) == 4 && !(half)))                                                                    \
            CALL(4, 0);                                                                                                \
        else if ((left) == 4)                                                                                          \
            CALL(3, HALVES);                                                                                           \
        else if ((left) == 3 && !(half))                                                                               \
            CALL(3, 0);                                                                                                \
        else if ((left) == 3)                                                                                          \
            CALL(2, HALVES);                                                                                           \
        else if ((left) == 2 && !(half))                                                                               \
            CALL(2, 0);                                                                                                \
        else if ((left) == 2)                                                                                          \
            CALL(1, HALVES);                                                                                           \
        else if (!(half))                                                                                              \
            CALL(1, 0);                                                                                                \
        else                                                                                                           \
            CALL(0, HALVES);                                                                                           \
    } while (0)

/* The last half of a padded row, and the zeros behind it: a NaN of another row may have got there. */
INLINE void store_rest(real *x, half_vec value)
{
    store_half(x, value);
    store_half(x + LANES / 2, (half_vec){0});
}

/* Whether the second half of a row's last vector is padding. */
INLINE int ends_in_half(int64_t H) { return HALVES && (H - 1) % LANES < LANES / 2; }

/* The reflections of a step that R has not taken up yet: R -= 2 (y_e e^T + y_n n^T). Four consecutive padded rows. */
typedef struct {
    real *e, *n, *y_e, *y_n;
} Pending;

INLINE Pending pending_of(real *rows, int64_t padded)
{
    return (Pending){rows, rows + padded, rows + 2 * padded, rows + 3 * padded};
}

/* R, transposed (H, padded), takes up what is pending; of the new R: WIDTH vectors of R e, R n and R h, one pass for all.
 * x: the rows e, n and h. */
INLINE void rotate_chunk(const int WIDTH, const int HALF, real *R, int64_t padded, int64_t H, Pending pending, const real *x, int64_t at,
                       real *products)
{
    vec along_e[CHUNK], along_n[CHUNK], sum[3][CHUNK];
#pragma GCC unroll 4
    for (int k = 0; k < WIDTH; k++) {
        along_e[k] = -2 * load(pending.y_e + at + k * LANES);
        along_n[k] = -2 * load(pending.y_n + at + k * LANES);
        sum[0][k] = sum[1][k] = sum[2][k] = (vec){0};
    }
    const int64_t rest = at + WIDTH * LANES;
    half_vec rest_e = {0}, rest_n = {0}, rest_sum[3] = {{0}};
    if (HALF) {
        rest_e = -2 * load_half(pending.y_e + rest);
        rest_n = -2 * load_half(pending.y_n + rest);
    }
    for (int64_t j = 0; j < H; j++) {
        vec by_e = splat(pending.e[j]), by_n = splat(pending.n[j]);
        vec e = splat(x[j]), n = splat(x[padded + j]), h = splat(x[2 * padded + j]);
#pragma GCC unroll 4
        for (int k = 0; k < WIDTH; k++) {
            real *place = R + j * padded + at + k * LANES;
            vec value = load(place) + by_e * along_e[k] + by_n * along_n[k];
            store(place, value);
            sum[0][k] += e * value;
            sum[1][k] += n * value;
            sum[2][k] += h * value;
        }
        if (HALF) {
            real *place = R + j * padded + rest;
            half_vec value = load_half(place) + half_of(by_e) * rest_e + half_of(by_n) * rest_n;
            store_half(place, value);
            rest_sum[0] += half_of(e) * value;
            rest_sum[1] += half_of(n) * value;
            rest_sum[2] += half_of(h) * value;
        }
    }
    for (int i = 0; i < 3; i++) {
#pragma GCC unroll 4
        for (int k = 0; k < WIDTH; k++)
            store(products + i * padded + at + k * LANES, sum[i][k]);
        if (HALF)
            store_rest(products + i * padded + rest, rest_sum[i]);
    }
}

/* Turn the memory, R <- R H_e H_n, and write z = R h, for R transposed and up to what is pending, which becomes this
 * step's part. products: three padded rows. */
static void rotate_memory(const Shared *shared, const Plane *plane, const real *h, real *R, Pending pending,
                        real *products, real *z)
{
    const int64_t padded = shared->padded, H = shared->scan->H, half = ends_in_half(H);
    const real *e = plane->e, *n = plane->n;
    real *last = plane->n + padded, *R_e = products, *R_n = R_e + padded, *R_h = R_n + padded;
    vec e_n_sum = {0}, e_h_sum = {0}, n_h_sum = {0}, squares = {0};
    for (int64_t j = 0; j < padded; j += LANES) {
        vec by_e = load(e + j), by_n = load(n + j), by_h = load(h + j);
        store(last + j, by_h);
        e_n_sum += by_e * by_n;
        e_h_sum += by_e * by_h;
        n_h_sum += by_n * by_h;
    }
    const real e_n = total_of(e_n_sum), e_h = total_of(e_h_sum), n_h = total_of(n_h_sum);
    for (int64_t at = 0; at < padded; at += CHUNK * LANES) {
#define ROTATE(W, HALF) rotate_chunk(W, HALF, R, padded, H, pending, e, at, products)
        WITH_WIDTH((padded - at) / LANES, half, ROTATE);
#undef ROTATE
    }
    for (int64_t i = 0; i < padded; i += LANES) {
        vec rotated_n = load(R_n + i) - 2 * e_n * load(R_e + i);
        store(R_n + i, rotated_n);
        squares += rotated_n * rotated_n;
    }
    /* 1, but for what rounding has added to |R n|, which is so taken out again */
    const real correction = (real)1.25 - (real)0.25 * total_of(squares);
    for (int64_t i = 0; i < padded; i += LANES) {
        vec along_e = load(R_e + i), along_n = load(R_n + i) * correction;
        store(pending.e + i, load(e + i));
        store(pending.n + i, load(n + i));
        store(pending.y_e + i, along_e);
        store(pending.y_n + i, along_n);
        store(z + i, load(R_h + i) - 2 * e_h * along_e - 2 * n_h * along_n);
    }
}

/* The gradient of the memory in the frame at rest, K = M - M^T with M = dL/dR R^T, takes up this step's g z^T - z g^T;
 * of the new K and the rows v_e, v_n: WIDTH vectors of K v_e and K v_n. */
INLINE void gather_chunk(const int WIDTH, const int HALF, real *K, int64_t stride, int64_t H, const real *g, const real *z,
                         const real *v_e, const real *v_n, int64_t at, real *K_e, real *K_n)
{
    vec by_g[CHUNK], by_z[CHUNK], sum_e[CHUNK], sum_n[CHUNK];
#pragma GCC unroll 4
    for (int k = 0; k < WIDTH; k++) {
        by_g[k] = load(g + at + k * LANES);
        by_z[k] = load(z + at + k * LANES);
        sum_e[k] = sum_n[k] = (vec){0};
    }
    const int64_t rest = at + WIDTH * LANES;
    half_vec rest_g = {0}, rest_z = {0}, rest_e = {0}, rest_n = {0};
    if (HALF) {
        rest_g = load_half(g + rest);
        rest_z = load_half(z + rest);
    }
    for (int64_t i = 0; i < H; i++) {
        vec at_g = splat(g[i]), at_z = splat(z[i]), at_e = splat(v_e[i]), at_n = splat(v_n[i]);
#pragma GCC unroll 4
        for (int k = 0; k < WIDTH; k++) {
            real *place = K + i * stride + at + k * LANES;
            vec value = load(place) + at_g * by_z[k] - at_z * by_g[k];
            store(place, value);
            sum_e[k] -= at_e * value; /* K v is minus the sum of K's rows, since K^T = -K */
            sum_n[k] -= at_n * value;
        }
        if (HALF) {
            real *place = K + i * stride + rest;
            half_vec value = load_half(place) + half_of(at_g) * rest_z - half_of(at_z) * rest_g;
            store_half(place, value);
            rest_e -= half_of(at_e) * value;
            rest_n -= half_of(at_n) * value;
        }
    }
    if (HALF) {
        store_rest(K_e + rest, rest_e);
        store_rest(K_n + rest, rest_n);
    }
#pragma GCC unroll 4
    for (int k = 0; k < WIDTH; k++) {
        store(K_e + at + k * LANES, sum_e[k]);
        store(K_n + at + k * LANES, sum_n[k]);
    }
}

/* R^T g, R^T a_e and R^T a_n, WIDTH vectors of each; R then goes back to before the step, R + 2 (y_e e^T + y_n n^T). */
INLINE void restore_chunk(const int WIDTH, const int HALF, real *R, int64_t stride, int64_t H, const real *const rows[5], const real *e,
                         const real *n, int64_t at, real *const results[3])
{
    vec by_e[CHUNK], by_n[CHUNK], sum[3][CHUNK];
#pragma GCC unroll 4
    for (int k = 0; k < WIDTH; k++) {
        by_e[k] = 2 * load(e + at + k * LANES);
        by_n[k] = 2 * load(n + at + k * LANES);
        sum[0][k] = sum[1][k] = sum[2][k] = (vec){0};
    }
    const int64_t rest = at + WIDTH * LANES;
    half_vec rest_e = {0}, rest_n = {0}, rest_sum[3] = {{0}};
    if (HALF) {
        rest_e = 2 * load_half(e + rest);
        rest_n = 2 * load_half(n + rest);
    }
    for (int64_t i = 0; i < H; i++) {
        vec g = splat(rows[0][i]), a_e = splat(rows[1][i]), a_n = splat(rows[2][i]);
        vec y_e = splat(rows[3][i]), y_n = splat(rows[4][i]);
#pragma GCC unroll 4
        for (int k = 0; k < WIDTH; k++) {
            real *place = R + i * stride + at + k * LANES;
            vec value = load(place);
            sum[0][k] += g * value;
            sum[1][k] += a_e * value;
            sum[2][k] += a_n * value;
            store(place, value + y_e * by_e[k] + y_n * by_n[k]);
        }
        if (HALF) {
            real *place = R + i * stride + rest;
            half_vec value = load_half(place);
            rest_sum[0] += half_of(g) * value;
            rest_sum[1] += half_of(a_e) * value;
            rest_sum[2] += half_of(a_n) * value;
            store_half(place, value + half_of(y_e) * rest_e + half_of(y_n) * rest_n);
        }
    }
    for (int i = 0; i < 3; i++) {
#pragma GCC unroll 4
        for (int k = 0; k < WIDTH; k++)
            store(results[i] + at + k * LANES, sum[i][k]);
        if (HALF)
            store_rest(results[i] + rest, rest_sum[i]);
    }
}

/* Gradients of ``rotate_memory`` from that of eps + z, in ``row->to_candidate``. R (H, padded), not transposed here, and K
 * go back to before the step. products: five padded rows. */
static void rotate_memory_backward(const Shared *shared, const Plane *plane, const Row *row, real *R, real *K,
                                 const real *y, const real *z, real *products, real *to_h)
{
    const int64_t padded = shared->padded, H = shared->scan->H, half = ends_in_half(H);
    const real *g = row->to_candidate, *y_e = y, *y_n = y + padded, *e = plane->e, *n = plane->n;
    real *v_e = products, *a_e = v_e + padded, *a_n = a_e + padded, *K_e = a_n + padded, *K_n = K_e + padded;
    const real e_n = dot(e, n, padded);
    for (int64_t i = 0; i < padded; i += LANES) /* R e after the step is -v_e, R n is -y_n */
        store(v_e + i, load(y_e + i) + 2 * e_n * load(y_n + i));
    for (int64_t at = 0; at < padded; at += CHUNK * LANES) {
#define GATHER(W, HALF) gather_chunk(W, HALF, K, padded, H, g, z, v_e, y_n, at, a_e, a_n)
        WITH_WIDTH((padded - at) / LANES, half, GATHER);
#undef GATHER
    }
    const real *const rows[5] = {g, a_e, a_n, y_e, y_n};
    real *const results[3] = {to_h, K_e, K_n};
    for (int64_t at = 0; at < padded; at += CHUNK * LANES) {
#define RESTORE(W, HALF) restore_chunk(W, HALF, R, padded, H, rows, e, n, at, results)
        WITH_WIDTH((padded - at) / LANES, half, RESTORE);
#undef RESTORE
    }
    /* K_e and K_n are -R^T K R e and -R^T K R n */
    const real along = dot(e, K_n, padded), scale = 2 * plane->inv_s * plane->inv_tau;
    for (int64_t j = 0; j < padded; j += LANES) {
        vec from = load(e + j), to = load(plane->w + j), by_n = load(K_n + j);
        store(row->to_tau + j, scale * (by_n - along * (2 * from + to)));
        vec across = (by_n - along * from) * plane->inv_s + load(K_e + j);
        store(row->to_eps + j, load(g + j) + 2 * plane->inv_eps * across);
    }
}

#endif
