/* What one step does to one row besides turning it: layer norm, activation, mixing, zoneout, and the gradients. */
#ifndef TORCHRUM_STEP_H
#define TORCHRUM_STEP_H

#include "matmul.h"

enum { RELU, TANH, SIGMOID, SOFTSIGN };
enum { NO_ZONEOUT, MIXED_ZONEOUT, MASKED_ZONEOUT };

/* One scan. Tensors are contiguous; one that a call does not use is NULL. call.py has the same fields in this order. */
typedef struct {
    int64_t backward;       /* whether gradients are asked for */
    int64_t T, B, H, gates; /* gates: row blocks of the weight, tau and u or tau alone */
    int64_t features;       /* of x; 0 where the projected input xp is given */
    int64_t R0_stride;      /* numbers from one row's R_0 to the next; 0 if all rows share one */
    int64_t block, threads; /* rows of the batch that walk through time together, and threads to walk them */
    int64_t activation, layer_norm, norm_after_sigmoid, zoneout_kind;
    int64_t keep_below, seed;    /* of zoneout's masks: a new value passes where its 32-bit hash is below */
    double eta, ln_eps, zoneout; /* eta 0: states keep their length */
    const real *xp;                     /* (T, B, (gates + 1) * H), or instead of it: */
    const real *x, *weight_ih, *bias;   /* (T, B, features), ((gates + 1) * H, features), ((gates + 1) * H,) or NULL */
    const real *h0, *R0, *weight, *ln_weight, *ln_bias; /* h0 may be NULL for zeros, R0 for the identity */
    const int64_t *lengths;
    real *out;
    real *out_copy;     /* out once more, for the caller to write to, or NULL */
    real *last;         /* (B, H): the last states once more, or NULL */
    real *saved;        /* (T, B, saved_rows * H): raw tau and the gate, raw with layer norm; with lam = 1 R h; with x eps */
    real *R_n, *R_copy, *kept; /* lam = 1 only; kept: (T, B, 2, H), R e and R n before their reflections */
    const real *grad_out, *grad_last; /* (T, B, H) and, of the last state once more, (B, H); each may be NULL */
    const real *grad_K;               /* (B, H, H), M - M^T with M = dL/dR_n R_n^T */
    real *grad_xp, *grad_h0, *grad_weight; /* grad_h0 may be NULL */
    real *grad_x, *grad_weight_ih, *grad_bias; /* with x only; grad_x may be NULL */
    real *grad_z;  /* (T, B, H): gradients of R h */
    real *ln_sums; /* (blocks, 2, gates + 1, H): gradients of layer norm's parameters, to be summed */
} Scan;

/* Rows of H numbers that a step keeps for the backward beside the state; the last one is eps where x is given. */
static int64_t saved_rows(const Scan *scan) { return scan->gates + (scan->R_n != NULL) + (scan->features > 0); }

/* What all threads read: padded sizes, layer norm's parameters in padded rows, the packed weight. */
typedef struct {
    const Scan *scan;
    int64_t padded;           /* H rounded up to whole vectors */
    mask tail;                /* takes the last H % LANES of the last LANES numbers of a row, and zeros behind them */
    mask overlap;             /* takes the last LANES numbers of a row out of the last two vectors of a padded one */
    const real *inside;       /* (padded): 1 for a unit, 0 behind the last one */
    const real *gain, *shift; /* (gates + 1, padded) */
    const real *bias;         /* (gates + 1, padded) */
    int few;                  /* at most DIRECT_ROWS rows and steps */
    int direct;               /* the weights are read as they are */
    Packed weight, weight_ih;
} Shared;

/* One row of a step in padded buffers; the backward has the same values again. */
typedef struct {
    real *eps, *tau, *u, *candidate; /* behind layer norm and activation */
    real *total;                     /* eps + R h */
    real *squashed;                  /* sigmoid of the raw gate where layer norm comes behind it */
    real *keep;                      /* zoneout's mask */
    real *grad, *to_candidate, *to_tau, *to_u, *to_eps, *skipped;
    real *scratch;                   /* three rows for vectors of rare cases */
} Row;

typedef struct {
    real mean, rstd;
} Moments;

/* A row of a tensor into a padded one; the zeros behind it are written too: a NaN may have got there.
 * Whole vectors only: one that was written in parts would have to wait for all of them when it is read. */
INLINE void fetch(const Shared *shared, real *row, const real *source)
{
    const int64_t H = shared->scan->H, whole = H - H % LANES;
    for (int64_t j = 0; j < whole; j += LANES)
        store(row + j, load_loose(source + j));
    if (whole == H)
        return;
#ifndef __clang__
    if (whole > 0) {
        store(row + whole, __builtin_shuffle(load_loose(source + H - LANES), (vec){0}, shared->tail));
        return;
    }
#endif
    store(row + whole, (vec){0});
    memcpy(row + whole, source + whole, (H - whole) * sizeof(real));
}

/* A padded row to its place in a tensor. */
INLINE void put(const Shared *shared, real *target, const real *row)
{
    const int64_t H = shared->scan->H, whole = H - H % LANES;
    for (int64_t j = 0; j < whole; j += LANES)
        store_loose(target + j, load(row + j));
    if (whole == H)
        return;
#ifndef __clang__
    if (whole > 0) { /* some are written twice: memcpy of so few costs more */
        vec last = __builtin_shuffle(load(row + whole - LANES), load(row + whole), shared->overlap);
        store_loose(target + H - LANES, last);
        return;
    }
#endif
    memcpy(target + whole, row + whole, (H - whole) * sizeof(real));
}

INLINE vec activate(int64_t activation, vec x)
{
    if (activation == RELU)
        return choose(x < 0, (vec){0}, x); /* NaN stays NaN */
    if (activation == TANH)
        return hyperbolic_tangent(x);
    if (activation == SIGMOID)
        return sigmoid(x);
    return x / (1 + absolute(x));
}

/* The derivative of an activation, from its value. */
INLINE vec slope(int64_t activation, vec y)
{
    if (activation == RELU)
        return choose(y > 0, splat(1), (vec){0});
    if (activation == TANH)
        return 1 - y * y;
    if (activation == SIGMOID)
        return y * (1 - y);
    vec rest = 1 - absolute(y);
    return rest * rest;
}

static Moments moments_of(const Shared *shared, const real *x)
{
    const real size = (real)shared->scan->H;
    vec sum = {0}, squares = {0};
    for (int64_t j = 0; j < shared->padded; j += LANES)
        sum += load(x + j);
    Moments moments = {total_of(sum) / size, 0};
    for (int64_t j = 0; j < shared->padded; j += LANES) {
        vec apart = (load(x + j) - moments.mean) * load(shared->inside + j);
        squares += apart * apart;
    }
    moments.rstd = 1 / square_root(total_of(squares) / size + (real)shared->scan->ln_eps);
    return moments;
}

/* y = layer norm of x; block 0 is tau, then u, then the candidate. */
static Moments normalise(const Shared *shared, int64_t block, const real *x, real *y)
{
    const real *gain = shared->gain + block * shared->padded, *shift = shared->shift + block * shared->padded;
    Moments moments = moments_of(shared, x);
    for (int64_t j = 0; j < shared->padded; j += LANES)
        store(y + j, (load(x + j) - moments.mean) * moments.rstd * load(gain + j) + load(shift + j));
    return moments;
}

/* Gradient of ``normalise`` in place, from its input; those of gain and shift are added to ``sums``. */
static void normalise_backward(const Shared *shared, int64_t block, const real *x, Moments moments, real *grad,
                               real *sums)
{
    const int64_t padded = shared->padded;
    const real *gain = shared->gain + block * padded;
    real *to_gain = sums + block * padded, *to_shift = to_gain + (shared->scan->gates + 1) * padded;
    vec sum = {0}, along = {0};
    for (int64_t j = 0; j < padded; j += LANES) {
        vec d = load(grad + j), unit = (load(x + j) - moments.mean) * moments.rstd, scaled = d * load(gain + j);
        store(to_gain + j, load(to_gain + j) + d * unit);
        store(to_shift + j, load(to_shift + j) + d);
        sum += scaled;
        along += scaled * unit;
    }
    real mean = total_of(sum) / (real)shared->scan->H, projection = total_of(along) / (real)shared->scan->H;
    for (int64_t j = 0; j < padded; j += LANES) {
        vec unit = (load(x + j) - moments.mean) * moments.rstd;
        vec rest = load(grad + j) * load(gain + j) - mean - unit * projection;
        store(grad + j, rest * moments.rstd * load(shared->inside + j));
    }
}

INLINE uint64_t hash32(int64_t signed_bits)
{
    uint64_t x = (uint64_t)(signed_bits ^ signed_bits >> 16);
    x = (x * 0x7feb352d) & 0xffffffff;
    x ^= x >> 15;
    x = (x * 0x846ca68b) & 0xffffffff;
    return x ^ x >> 16;
}

/* Whether zoneout lets each new value of a row through: 1 or 0, as zoneout.py's masks. */
static void keep_new(const Scan *scan, int64_t t, int64_t row, real *keep)
{
    int64_t key = (int64_t)hash32(scan->seed ^ (int64_t)((uint64_t)t * 0x9e3779b9 & 0xffffffff));
    for (int64_t j = 0; j < scan->H; j++)
        keep[j] = hash32(key ^ (row * scan->H + j)) < (uint64_t)scan->keep_below;
}

/* |x| of a padded row whose squares sum to ``square``; again where those overflow. */
static real length_of(const real *x, real square, int64_t padded)
{
    if (square < LARGE_SQUARE)
        return square_root(square);
    real largest = 0;
    for (int64_t j = 0; j < padded; j++) {
        real size = x[j] < 0 ? -x[j] : x[j];
        largest = size > largest ? size : largest;
    }
    real sum = 0;
    for (int64_t j = 0; j < padded; j++)
        sum += x[j] / largest * (x[j] / largest);
    return largest * square_root(sum);
}

/* 1/length; 0 for what is too short to have a direction. NaN stays NaN. */
INLINE real inverse_of(real length) { return length <= NO_DIRECTION ? 0 : 1 / length; }

/* The update gate of a row from its raw value. */
static Moments find_gate(const Shared *shared, const real *raw, const Row *row)
{
    const Scan *scan = shared->scan;
    const int64_t padded = shared->padded;
    Moments moments = {0, 1};
    if (scan->layer_norm && scan->norm_after_sigmoid) {
        for (int64_t j = 0; j < padded; j += LANES)
            store(row->squashed + j, sigmoid(load(raw + j)) * load(shared->inside + j));
        return normalise(shared, 1, row->squashed, row->u);
    }
    if (scan->layer_norm) {
        moments = normalise(shared, 1, raw, row->u);
        raw = row->u;
    }
    for (int64_t j = 0; j < padded; j += LANES)
        store(row->u + j, sigmoid(load(raw + j)));
    return moments;
}

/* The candidate from eps + R h, and its layer norm's moments. */
static Moments find_candidate(const Shared *shared, const Row *row)
{
    const int64_t activation = shared->scan->activation;
    const real *x = row->total;
    Moments moments = {0, 1};
    if (shared->scan->layer_norm) {
        moments = normalise(shared, shared->scan->gates, row->total, row->candidate);
        x = row->candidate;
    }
    for (int64_t j = 0; j < shared->padded; j += LANES)
        store(row->candidate + j, activate(activation, load(x + j)));
    return moments;
}

/* u h + (1 - u) candidate, the candidate alone without an update gate; returns its length. */
static real mix(const Shared *shared, const Row *row, const real *h, real *mixed)
{
    vec squares = {0};
    for (int64_t j = 0; j < shared->padded; j += LANES) {
        vec value = load(row->candidate + j);
        if (shared->scan->gates == 2) { /* not c + u (h - c): that rounds h away where u is 1 and c is large */
            vec u = load(row->u + j);
            value = u * load(h + j) + (1 - u) * value;
        }
        value *= load(shared->inside + j);
        store(mixed + j, value);
        squares += value * value;
    }
    return shared->scan->eta == 0 ? 1 : length_of(mixed, total_of(squares), shared->padded);
}

/* From gate and candidate to the new state, in place of the old one. */
static void advance(const Shared *shared, int64_t t, int64_t b, const Row *row, real *h)
{
    const Scan *scan = shared->scan;
    const int64_t padded = shared->padded;
    real *new = scan->zoneout_kind == NO_ZONEOUT ? h : row->scratch;
    real length = mix(shared, row, h, new);
    if (scan->eta != 0) {
        real scale = (real)scan->eta * inverse_of(length);
        for (int64_t j = 0; j < padded; j += LANES)
            store(new + j, load(new + j) * scale);
    }
    if (scan->zoneout_kind == MASKED_ZONEOUT) {
        keep_new(scan, t, b, row->keep);
        for (int64_t j = 0; j < padded; j += LANES)
            store(h + j, choose(load(row->keep + j) > 0, load(new + j), load(h + j)));
    } else if (scan->zoneout_kind == MIXED_ZONEOUT) {
        for (int64_t j = 0; j < padded; j += LANES)
            store(h + j, load(new + j) + (real)scan->zoneout * (load(h + j) - load(new + j)));
    }
}

/* From the gradient of the new state, in ``row->grad``, to those of candidate and gate ahead of their layer norms.
 * ``row->grad`` becomes the gradient of the mixed value, ``row->skipped`` what passes by the step. */
static void advance_backward(const Shared *shared, int64_t t, int64_t b, const Row *row, const real *h)
{
    const Scan *scan = shared->scan;
    const int64_t padded = shared->padded, gated = scan->gates == 2;
    if (scan->zoneout_kind != NO_ZONEOUT) {
        if (scan->zoneout_kind == MASKED_ZONEOUT)
            keep_new(scan, t, b, row->keep);
        for (int64_t j = 0; j < padded; j += LANES) {
            vec grad = load(row->grad + j), through = grad * (1 - (real)scan->zoneout);
            if (scan->zoneout_kind == MASKED_ZONEOUT)
                through = grad * load(row->keep + j);
            store(row->skipped + j, grad - through);
            store(row->grad + j, through);
        }
    }
    if (scan->eta != 0) {
        real *mixed = row->scratch, inverse = inverse_of(mix(shared, row, h, mixed));
        real along = dot(row->grad, mixed, padded) * inverse * inverse, scale = (real)scan->eta * inverse;
        for (int64_t j = 0; j < padded; j += LANES)
            store(row->grad + j, (load(row->grad + j) - along * load(mixed + j)) * scale);
    }
    const int64_t after = scan->layer_norm && scan->norm_after_sigmoid;
    for (int64_t j = 0; j < padded; j += LANES) {
        vec grad = load(row->grad + j), candidate = load(row->candidate + j), share = slope(scan->activation, candidate);
        if (gated) {
            vec u = load(row->u + j), to_u = grad * (load(h + j) - candidate);
            share *= 1 - u;
            if (!after)
                to_u *= u * (1 - u);
            store(row->to_u + j, to_u);
        }
        store(row->to_candidate + j, grad * share * load(shared->inside + j));
    }
}

/* The raw gate's gradient, in ``row->to_u``, through its layer norm. */
static void gate_backward(const Shared *shared, const real *raw, Moments moments, const Row *row, real *sums)
{
    if (!shared->scan->layer_norm)
        return;
    if (!shared->scan->norm_after_sigmoid) {
        normalise_backward(shared, 1, raw, moments, row->to_u, sums);
        return;
    }
    normalise_backward(shared, 1, row->squashed, moments, row->to_u, sums);
    for (int64_t j = 0; j < shared->padded; j += LANES) {
        vec u = load(row->squashed + j);
        store(row->to_u + j, load(row->to_u + j) * u * (1 - u));
    }
}

#endif
