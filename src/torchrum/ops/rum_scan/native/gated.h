/* The gated scan, ../../gated_scan/README.md: a block of rows walks through all steps by itself, as in walk.h. */
#ifndef TORCHRUM_GATED_H
#define TORCHRUM_GATED_H

#include "gradient.h"
#include "step.h"

/* One scan. Tensors are contiguous; one that a call does not use is NULL. ../../gated_scan/native.py has the same fields
 * in this order. */
typedef struct {
    int64_t backward; /* whether gradients are asked for */
    int64_t T, B, H;
    int64_t features; /* of x; 0 where the projected input xp is given */
    int64_t head_size, rotated;
    int64_t block, threads; /* rows of the batch that walk through time together, and threads to walk them */
    int64_t masked;         /* zoneout draws masks; otherwise it mixes */
    int64_t keep_below, seed;
    double zoneout;
    const real *xp;                        /* (T, B, 3 H), blocks r, u, n; or instead of it: */
    const real *x, *weight_ih, *bias_ih;   /* (T, B, features), (3 H, features), (3 H) or NULL */
    const real *h0, *weight, *bias;        /* (B, H), (3 H, H), (3 H) or NULL; h0 may be NULL for zeros */
    const int64_t *lengths;
    real *out;
    real *out_copy; /* out once more, for the caller to write to, or NULL */
    real *last;     /* (B, H): the last states once more, or NULL */
    real *gates;    /* (T, B, 3 H): r, u, tau, and with x (T, B, 4 H) with eps behind; NULL where there is no backward */
    const real *grad_out, *grad_last; /* (T, B, H) and, of the last state once more, (B, H); each may be NULL */
    real *grad_xp, *grad_tau;         /* (T, B, 3 H), (T, B, H); NULL where nobody asks for them, with x only */
    real *grad_h0, *grad_weight, *grad_bias;  /* grad_h0 may be NULL */
    real *grad_x, *grad_weight_ih, *grad_bias_ih; /* with x only; grad_x may be NULL */
} GatedScan;

/* Numbers that a step keeps of each row for the backward. */
static int64_t kept_of(const GatedScan *scan) { return (3 + (scan->features > 0)) * scan->H; }

/* What all threads read. */
typedef struct {
    const GatedScan *scan;
    int64_t padded;      /* H rounded up to whole vectors */
    int64_t size, width; /* a head in memory, a power of two, and all heads */
    int direct;          /* the weight is read as it is */
    int in_place;        /* heads lie in memory as they are: nothing need be moved */
    int64_t window;      /* steps whose x a block projects at once; 0 where all are projected, or given so */
    const real *bias;    /* (3, padded) */
    const real *bias_ih; /* the same, with a window */
    const real *xp;      /* (T, B, 3 H), given or, */
    real *projected;     /* where x has few rows, found here */
    const real *rotates;   /* (width): 1 in heads of more than one unit */
    const real *rotated; /* (padded): 1 for a unit that takes the rotated state */
    Packed weight, weight_ih; /* weight_ih with a window, and for the gradient of x of many rows */
} GatedShared;

/* The heads of one row, (width) each: where they turn, z = H_m H_e h, and the gradients. e and m are zero where nothing
 * turns; the inverse lengths of eps, tau and e + w, for each unit of a head, where there is no gradient. */
typedef struct {
    real *eps, *tau, *h, *z, *e, *w, *m, *inv_eps, *inv_tau, *inv_s, *grad, *to_eps, *to_tau, *to_h;
} Heads;

typedef struct {
    real *r, *u, *tau, *eps, *h, *z, *candidate; /* of one row, (padded) */
    real *grad, *skipped, *to_z, *to_eps, *to_tau, *to_h;
    real *states, *sums;   /* (block, padded), (block, 3, padded) */
    real *grad_h, *to_sums; /* (block, padded), (block, 3, padded) */
    real *columns;          /* for add_products */
    real *x, *window;       /* (window, block, features), (window, block, 3, padded) */
    Heads heads;
} GatedWork;

typedef struct {
    real *start; /* NULL only measures */
    int64_t used;
} GatedArena;

static real *take_row(GatedArena *arena, int64_t size)
{
    int64_t at = arena->used;
    arena->used += padded_size(size);
    return arena->start ? arena->start + at : NULL;
}

static int64_t lay_out_gated(const GatedShared *shared, real *start, GatedWork *work)
{
    GatedArena arena = {start, 0};
    real **rows[] = {&work->r,    &work->u,       &work->tau,  &work->eps,    &work->h,      &work->z,   &work->candidate,
                     &work->grad, &work->skipped, &work->to_z, &work->to_eps, &work->to_tau, &work->to_h};
    real **heads[] = {&work->heads.eps,     &work->heads.tau,     &work->heads.h,     &work->heads.z,    &work->heads.e,
                      &work->heads.w,       &work->heads.m,       &work->heads.inv_eps, &work->heads.inv_tau,
                      &work->heads.inv_s,   &work->heads.grad,    &work->heads.to_eps, &work->heads.to_tau, &work->heads.to_h};
    const int64_t block = shared->scan->block * shared->padded, backward = shared->scan->backward;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        *rows[i] = take_row(&arena, shared->padded);
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        *heads[i] = take_row(&arena, shared->width);
    work->states = take_row(&arena, block);
    work->sums = take_row(&arena, !backward * 3 * block);
    work->grad_h = take_row(&arena, backward * block);
    work->to_sums = take_row(&arena, backward * 3 * block);
    work->columns = take_row(&arena, shared->direct && !backward ? columns_size(shared->scan->block, shared->scan->H) : 0);
    work->x = take_row(&arena, shared->window * shared->scan->block * shared->scan->features);
    work->window = take_row(&arena, shared->window * 3 * block);
    return arena.used;
}

/* H numbers of a tensor into a padded row, whose padding is zero already, and back. */
INLINE void read_row(const GatedShared *shared, real *row, const real *source)
{
    const int64_t H = shared->scan->H, whole = H - H % LANES;
    for (int64_t j = 0; j < whole; j += LANES)
        store(row + j, load_loose(source + j));
    for (int64_t j = whole; j < H; j++)
        row[j] = source[j];
}

INLINE void write_row(const GatedShared *shared, real *target, const real *row)
{
    const int64_t H = shared->scan->H, whole = H - H % LANES;
    for (int64_t j = 0; j < whole; j += LANES)
        store_loose(target + j, load(row + j));
    for (int64_t j = whole; j < H; j++)
        target[j] = row[j];
}

/* Units of each head to where a head of ``size`` begins, and back. */
static void spread_heads(const GatedShared *shared, real *heads, const real *row)
{
    const int64_t n = shared->scan->head_size, K = shared->scan->rotated;
    for (int64_t j = 0; j < K; j += n)
        memcpy(heads + j / n * shared->size, row + j, (K - j < n ? K - j : n) * sizeof(real));
}

static void gather_heads(const GatedShared *shared, real *row, const real *heads)
{
    const int64_t n = shared->scan->head_size, K = shared->scan->rotated;
    for (int64_t j = 0; j < K; j += n)
        memcpy(row + j, heads + j / n * shared->size, (K - j < n ? K - j : n) * sizeof(real));
}

/* Sums over each group of ``size`` lanes, a power of two, in each lane of the group. */
INLINE vec sum_lanes(vec x, const int64_t size)
{
    for (int64_t step = 1; step < size && step < LANES; step *= 2) {
#ifdef __clang__
        vec other;
        for (int64_t i = 0; i < LANES; i++)
            other[i] = x[i ^ step];
#else
        mask places;
        for (int64_t i = 0; i < LANES; i++)
            places[i] = i ^ step;
        vec other = __builtin_shuffle(x, places);
#endif
        x += other;
    }
    return x;
}

INLINE vec root(vec x)
{
    real numbers[LANES] __attribute__((aligned(VECTOR_BYTES)));
    store(numbers, x);
    for (int64_t i = 0; i < LANES; i++)
        numbers[i] = square_root(numbers[i]);
    return load(numbers);
}

INLINE int64_t any_of(mask where)
{
    int64_t parts[VECTOR_BYTES / 8], any = 0;
    memcpy(parts, &where, sizeof parts);
    for (int i = 0; i < VECTOR_BYTES / 8; i++)
        any |= parts[i];
    return any;
}

/* 1/x; 0 where x is at most ``tiny``. NaN stays NaN. */
INLINE vec inverse_above(vec x, real tiny) { return choose(x <= tiny, (vec){0}, 1 / x); }

/* Inner products in each lane of a head; a head longer than a vector takes several. */
INLINE vec head_dot(const real *x, const real *y, const int64_t size)
{
    vec sum = load(x) * load(y);
    for (int64_t j = LANES; j < size; j += LANES)
        sum += load(x + j) * load(y + j);
    return sum_lanes(sum, size);
}

/* Where tau points against eps: m is the axis where |e| is smallest, made orthogonal to e. It has no gradient. */
static void half_turn(const real *e, real *m, int64_t units)
{
    int64_t smallest = 0;
    real square = 0;
    for (int64_t j = 1; j < units; j++)
        if (__builtin_fabs(e[j]) < __builtin_fabs(e[smallest]))
            smallest = j;
    for (int64_t j = 0; j < units; j++) {
        m[j] = (j == smallest) - e[smallest] * e[j];
        square += m[j] * m[j];
    }
    for (int64_t j = 0; j < units; j++)
        m[j] /= square_root(square);
}

/* Units of the head that begins at ``at``. */
static int64_t units_of(const GatedShared *shared, int64_t at)
{
    const int64_t n = shared->scan->head_size, left = shared->scan->rotated - at / shared->size * n;
    return left < n ? left : n;
}

/* Find the planes of a row and z = R h. */
INLINE void rotate_heads(const GatedShared *shared, const Heads *heads, const int64_t size)
{
    const int64_t group = size < LANES ? LANES : size;
    for (int64_t at = 0; at < shared->width; at += group) {
        const real *eps = heads->eps + at, *tau = heads->tau + at, *h = heads->h + at;
        vec inv_eps = inverse_above(root(head_dot(eps, eps, size)), NO_DIRECTION);
        vec inv_tau = inverse_above(root(head_dot(tau, tau, size)), NO_DIRECTION);
        mask fixed = (inv_eps == 0) | (inv_tau == 0) | (load(shared->rotates + at) == 0);
        vec square = {0}, tilt = {0};
        for (int64_t j = 0; j < group; j += LANES) {
            vec e = load(eps + j) * inv_eps, w = load(tau + j) * inv_tau, s = e + w;
            store(heads->e + at + j, e);
            store(heads->w + at + j, w);
            square += s * s;
            tilt += s * (e - w);
        }
        square = sum_lanes(square, size);
        vec rest = 4 - square; /* |e - w|^2 */
        tilt = sum_lanes(tilt, size) / choose(rest < 2, splat(2), rest);
        vec length = root(square), inv_s = inverse_above(length, (real)OPPOSITE);
        mask opposite = (length <= (real)OPPOSITE) & ~fixed;
        for (int64_t j = 0; j < group; j += LANES) { /* rotation.md: rounding tilts a short s along e - w */
            vec e = load(heads->e + at + j), w = load(heads->w + at + j);
            store(heads->m + at + j, choose(fixed, (vec){0}, (e + w - tilt * (e - w)) * inv_s));
            store(heads->e + at + j, choose(fixed, (vec){0}, e));
            store(heads->inv_eps + at + j, choose(fixed, (vec){0}, inv_eps));
            store(heads->inv_tau + at + j, choose(fixed | opposite, (vec){0}, inv_tau));
            store(heads->inv_s + at + j, choose(fixed, (vec){0}, inv_s));
        }
        for (int64_t i = 0; i < group && any_of(opposite); i += size)
            if (opposite[i % LANES])
                half_turn(heads->e + at + i, heads->m + at + i, units_of(shared, at + i));
        vec p = 2 * head_dot(heads->e + at, h, size);
        for (int64_t j = 0; j < group; j += LANES)
            store(heads->z + at + j, load(h + j) - p * load(heads->e + at + j));
        vec q = 2 * head_dot(heads->m + at, heads->z + at, size);
        for (int64_t j = 0; j < group; j += LANES)
            store(heads->z + at + j, load(heads->z + at + j) - q * load(heads->m + at + j));
    }
}

/* Gradients of eps, tau and h from that of z. */
INLINE void rotate_heads_backward(const GatedShared *shared, const Heads *heads, const int64_t size)
{
    const int64_t group = size < LANES ? LANES : size;
    for (int64_t at = 0; at < shared->width; at += group) {
        const real *e = heads->e + at, *w = heads->w + at, *m = heads->m + at, *h = heads->h + at, *grad = heads->grad + at;
        real *to_h = heads->to_h + at, *to_tau = heads->to_tau + at, *to_eps = heads->to_eps + at;
        vec p = head_dot(e, h, size), m_grad = head_dot(m, grad, size), m_g = {0}, e_grad = {0};
        for (int64_t j = 0; j < group; j += LANES) {
            m_g += load(m + j) * (load(h + j) - 2 * p * load(e + j));
            store(to_h + j, load(grad + j) - 2 * m_grad * load(m + j)); /* the gradient of g = H_e h */
            e_grad += load(e + j) * load(to_h + j);
        }
        m_g = sum_lanes(m_g, size);
        e_grad = sum_lanes(e_grad, size);
        vec along = {0};
        for (int64_t j = 0; j < group; j += LANES) {
            vec g = load(h + j) - 2 * p * load(e + j);
            vec to_s = 4 * m_g * m_grad * load(m + j) - 2 * (m_g * load(grad + j) + m_grad * g);
            store(to_tau + j, to_s * load(heads->inv_s + at + j));
            along += load(e + j) * load(to_tau + j);
        }
        along = sum_lanes(along, size); /* the inner product with w is minus that */
        for (int64_t j = 0; j < group; j += LANES) {
            vec to_s = load(to_tau + j), to_g = load(to_h + j), from = load(e + j);
            vec to_e = to_s - 2 * (p * to_g + e_grad * load(h + j)) + (4 * p * e_grad - along) * from;
            store(to_eps + j, to_e * load(heads->inv_eps + at + j));
            store(to_tau + j, (to_s + along * load(w + j)) * load(heads->inv_tau + at + j));
            store(to_h + j, to_g - 2 * e_grad * from);
        }
    }
}

/* One row's tau + P R h in place of z, from eps, tau and h; the planes stay for the backward. */
static void rotate_row(const GatedShared *shared, GatedWork *work)
{
    Heads *heads = &work->heads;
    if (shared->in_place) {
        heads->eps = work->eps, heads->tau = work->tau, heads->h = work->h, heads->z = work->z;
    } else {
        spread_heads(shared, heads->eps, work->eps);
        spread_heads(shared, heads->tau, work->tau);
        spread_heads(shared, heads->h, work->h);
    }
    if (shared->size == 8) /* the usual one: the compiler unrolls its sums */
        rotate_heads(shared, heads, 8);
    else
        rotate_heads(shared, heads, shared->size);
    if (!shared->in_place)
        gather_heads(shared, work->z, heads->z);
    for (int64_t j = 0; j < shared->padded; j += LANES)
        store(work->z + j, load(work->tau + j) + choose(load(shared->rotated + j) > 0, load(work->z + j), (vec){0}));
}

/* Add the gradients that pass through the rotation to those of eps, tau and h, from that of P R h in to_z. */
static void rotate_row_backward(const GatedShared *shared, GatedWork *work)
{
    Heads *heads = &work->heads;
    if (shared->in_place)
        for (int64_t j = 0; j < shared->width; j += LANES)
            store(heads->grad + j, choose(load(shared->rotated + j) > 0, load(work->to_z + j), (vec){0}));
    else
        spread_heads(shared, heads->grad, work->to_z);
    if (shared->size == 8)
        rotate_heads_backward(shared, heads, 8);
    else
        rotate_heads_backward(shared, heads, shared->size);
    real *found[] = {heads->to_eps, heads->to_tau, heads->to_h}, *totals[] = {work->to_eps, work->to_tau, work->to_h};
    for (int i = 0; i < 3; i++) {
        real *row = found[i];
        if (!shared->in_place) {
            row = work->z;
            gather_heads(shared, row, found[i]);
        }
        const int64_t end = shared->in_place ? shared->width : shared->padded;
        for (int64_t j = 0; j < end; j += LANES)
            store(totals[i] + j, load(totals[i] + j) + choose(load(shared->rotated + j) > 0, load(row + j), (vec){0}));
    }
}

/* The share of each new value in the state: zoneout's mask, as masks.py draws it, or 1 - zoneout. */
INLINE vec share_of_new(const GatedScan *scan, int64_t key, int64_t first, int64_t j)
{
    vec share = splat(1 - (real)scan->zoneout);
    for (int64_t i = 0; scan->masked && i < LANES; i++)
        share[i] = hash32(key ^ (first + j + i)) < (uint64_t)scan->keep_below;
    return share;
}

static int64_t key_of(const GatedScan *scan, int64_t t)
{
    return (int64_t)hash32(scan->seed ^ (int64_t)((uint64_t)t * 0x9e3779b9 & 0xffffffff));
}

/* One row of a step: ``xp`` has the projected input, in blocks ``stride`` apart, ``sums`` what the state adds to r, u and
 * tau, ``h`` the state, which becomes the new one. */
static void gated_forward(const GatedShared *shared, GatedWork *work, int64_t t, int64_t b, const real *xp, int64_t stride,
                          real *sums, real *h)
{
    const GatedScan *scan = shared->scan;
    const int64_t H = scan->H, padded = shared->padded, at = t * scan->B + b;
    real *projected[] = {work->r, work->u, work->eps};
    for (int64_t i = 0; i < 3; i++)
        read_row(shared, projected[i], xp + i * stride);
    work->tau = sums + 2 * padded;
    work->h = h;
    rotate_row(shared, work);
    const int64_t key = scan->zoneout > 0 ? key_of(scan, t) : 0;
    for (int64_t j = 0; j < padded; j += LANES) {
        vec r = sigmoid(load(work->r + j) + load(sums + j)), u = sigmoid(load(work->u + j) + load(sums + padded + j));
        vec candidate = hyperbolic_tangent(load(work->eps + j) + r * load(work->z + j)), old = load(h + j);
        vec new = u * old + (1 - u) * candidate; /* not c + u (h - c), which rounds h away where u is 1 and c is large */
        if (scan->zoneout > 0) {
            vec share = share_of_new(scan, key, b * H, j);
            if (scan->masked)
                new = choose(share > 0, new, old);
            else
                new += (1 - share) * (old - new);
        }
        store(work->r + j, r);
        store(work->u + j, u);
        store(h + j, new);
    }
    for (int64_t j = H; j < padded; j++)
        h[j] = 0; /* behind the last unit: a NaN must not spread */
    if (scan->gates != NULL) {
        real *gates = scan->gates + at * kept_of(scan);
        write_row(shared, gates, work->r);
        write_row(shared, gates + H, work->u);
        write_row(shared, gates + 2 * H, work->tau);
        if (scan->features > 0)
            write_row(shared, gates + 3 * H, work->eps);
    }
}

/* Gradients of one row of a step: ``grad_h`` is that of the new state and becomes that of the old one, up to what passes
 * through the weight; ``to_sums`` (3, H) gets those of r and u before their sigmoids and of tau. */
static void gated_backward(const GatedShared *shared, GatedWork *work, int64_t t, int64_t b, real *grad_h, real *to_sums)
{
    const GatedScan *scan = shared->scan;
    const int64_t H = scan->H, padded = shared->padded, at = t * scan->B + b;
    const real *gates = scan->gates + at * kept_of(scan);
    read_row(shared, work->r, gates);
    read_row(shared, work->u, gates + H);
    read_row(shared, work->tau, gates + 2 * H);
    read_row(shared, work->eps, scan->features > 0 ? gates + 3 * H : scan->xp + (at * 3 + 2) * H);
    if (t > 0 || scan->h0 != NULL)
        read_row(shared, work->h, t > 0 ? scan->out + (at - scan->B) * H : scan->h0 + b * H);
    else
        memset(work->h, 0, padded * sizeof(real));
    rotate_row(shared, work);
    const int64_t key = scan->zoneout > 0 ? key_of(scan, t) : 0;
    for (int64_t j = 0; j < padded; j += LANES) {
        vec r = load(work->r + j), u = load(work->u + j), inner = load(work->z + j), h = load(work->h + j);
        vec candidate = hyperbolic_tangent(load(work->eps + j) + r * inner), grad = load(grad_h + j), skipped = {0};
        if (scan->zoneout > 0) {
            vec through = grad * share_of_new(scan, key, b * H, j);
            skipped = grad - through;
            grad = through;
        }
        vec to_sum = grad * (1 - u) * (1 - candidate * candidate), to_z = to_sum * r;
        store(work->to_eps + j, to_sum);
        store(work->to_tau + j, to_z);
        store(work->to_z + j, to_z);
        store(work->to_h + j, grad * u + skipped);
        store(work->r + j, to_sum * inner * r * (1 - r));
        store(work->u + j, grad * (h - candidate) * u * (1 - u));
    }
    rotate_row_backward(shared, work);
    memcpy(grad_h, work->to_h, padded * sizeof(real));
    write_row(shared, scan->grad_xp + at * 3 * H, work->r);
    write_row(shared, scan->grad_xp + (at * 3 + 1) * H, work->u);
    write_row(shared, scan->grad_xp + (at * 3 + 2) * H, work->to_eps);
    if (scan->grad_tau != NULL)
        write_row(shared, scan->grad_tau + at * H, work->to_tau);
    write_row(shared, to_sums, work->r);
    write_row(shared, to_sums + H, work->u);
    write_row(shared, to_sums + 2 * H, work->to_tau);
}

static int has_ended(const GatedScan *scan, int64_t t, int64_t b) { return scan->lengths != NULL && t >= scan->lengths[b]; }

/* A block's rows of a tensor (T, B, numbers) at another step, which a matmul asks for meanwhile. */
static void prefetch_gated_rows(const GatedScan *scan, Prefetch *prefetch, const real *x, int64_t t, int64_t first, int64_t rows, int64_t numbers)
{
    if (x != NULL && t >= 0 && t < scan->T)
        add_prefetch(prefetch, x + (t * scan->B + first) * numbers, rows * numbers);
}

/* Project what a block reads in the steps of a window, the first of them t. */
static void project_window(const GatedShared *shared, int64_t t, int64_t first, int64_t rows, GatedWork *work)
{
    const GatedScan *scan = shared->scan;
    const int64_t I = scan->features, numbers = 3 * shared->padded;
    const int64_t steps = scan->T - t < shared->window ? scan->T - t : shared->window;
    for (int64_t i = 0; i < steps; i++)
        memcpy(work->x + i * rows * I, scan->x + ((t + i) * scan->B + first) * I, rows * I * sizeof(real));
    for (int64_t i = 0; i < steps * rows; i++)
        memcpy(work->window + i * numbers, shared->bias_ih, numbers * sizeof(real));
    matmul(work->x, I, &shared->weight_ih, work->window, numbers, steps * rows, NULL);
}

static void gated_walk_forward(const GatedShared *shared, int64_t first, int64_t rows, GatedWork *work)
{
    const GatedScan *scan = shared->scan;
    const int64_t H = scan->H, padded = shared->padded;
    for (int64_t i = 0; i < rows; i++) {
        memset(work->states + i * padded, 0, padded * sizeof(real));
        if (scan->h0 != NULL)
            read_row(shared, work->states + i * padded, scan->h0 + (first + i) * H);
    }
    for (int64_t t = 0; t < scan->T; t++) {
        if (shared->window > 0 && t % shared->window == 0)
            project_window(shared, t, first, rows, work);
        for (int64_t i = 0; i < rows; i++)
            memcpy(work->sums + i * 3 * padded, shared->bias, 3 * padded * sizeof(real));
        Prefetch prefetch = {.count = 0};
        prefetch_gated_rows(scan, &prefetch, scan->gates, t, first, rows, kept_of(scan));
        prefetch_gated_rows(scan, &prefetch, scan->out_copy, t, first, rows, H);
        prefetch_gated_rows(scan, &prefetch, scan->out, t, first, rows, H);
        prefetch_gated_rows(scan, &prefetch, scan->xp, t + 1, first, rows, 3 * H);
        if (shared->window > 0)
            prefetch_gated_rows(scan, &prefetch, scan->x, t + shared->window, first, rows, scan->features);
        if (!shared->direct)
            matmul(work->states, padded, &shared->weight, work->sums, 3 * padded, rows, &prefetch);
        if (shared->direct && (t > 0 || scan->h0 != NULL)) {
            const Rows states = pack_rows(work->states, padded, rows, H, work->columns);
            for (int64_t i = 0; i < 3; i++)
                add_products(scan->weight + i * H * H, H, &states, work->sums + i * padded, 3 * padded);
        }
        for (int64_t i = 0; i < rows; i++) {
            const int64_t b = first + i, at = t * scan->B + b;
            const real *xp = shared->xp + at * 3 * H;
            if (shared->window > 0)
                xp = work->window + (t % shared->window * rows + i) * 3 * padded;
            if (!has_ended(scan, t, b))
                gated_forward(shared, work, t, b, xp, shared->window > 0 ? padded : H, work->sums + i * 3 * padded,
                              work->states + i * padded);
            else if (scan->gates != NULL)
                memset(scan->gates + at * kept_of(scan), 0, kept_of(scan) * sizeof(real));
            write_row(shared, scan->out + at * H, work->states + i * padded);
            if (scan->out_copy != NULL)
                write_row(shared, scan->out_copy + at * H, work->states + i * padded);
        }
    }
    for (int64_t i = 0; scan->last != NULL && i < rows; i++)
        write_row(shared, scan->last + (first + i) * H, work->states + i * padded);
}

static void gated_walk_backward(const GatedShared *shared, int64_t first, int64_t rows, GatedWork *work)
{
    const GatedScan *scan = shared->scan;
    const int64_t H = scan->H, padded = shared->padded;
    memset(work->grad_h, 0, rows * padded * sizeof(real));
    memset(work->grad, 0, padded * sizeof(real));
    for (int64_t i = 0; scan->grad_last != NULL && i < rows; i++)
        read_row(shared, work->grad_h + i * padded, scan->grad_last + (first + i) * H);
    for (int64_t t = scan->T - 1; t >= 0; t--) {
        for (int64_t i = 0; i < rows; i++) {
            const int64_t b = first + i, at = t * scan->B + b;
            real *grad_h = work->grad_h + i * padded, *to_sums = work->to_sums + i * 3 * H;
            if (scan->grad_out != NULL)
                read_row(shared, work->grad, scan->grad_out + at * H);
            for (int64_t j = 0; scan->grad_out != NULL && j < padded; j += LANES)
                store(grad_h + j, load(grad_h + j) + load(work->grad + j));
            if (!has_ended(scan, t, b)) {
                gated_backward(shared, work, t, b, grad_h, to_sums);
                continue;
            }
            memset(to_sums, 0, 3 * H * sizeof(real));
            memset(scan->grad_xp + at * 3 * H, 0, 3 * H * sizeof(real));
            if (scan->grad_tau != NULL)
                memset(scan->grad_tau + at * H, 0, H * sizeof(real));
        }
        if (t == 0 && scan->grad_h0 == NULL)
            return;
        if (shared->direct) {
            add_rows(scan->weight, 3 * H, H, work->to_sums, 3 * H, rows, work->grad_h, padded);
            continue;
        }
        Prefetch prefetch = {.count = 0};
        prefetch_gated_rows(scan, &prefetch, scan->grad_tau, t - 1, first, rows, H);
        prefetch_gated_rows(scan, &prefetch, scan->grad_xp, t - 1, first, rows, 3 * H);
        prefetch_gated_rows(scan, &prefetch, scan->out, t - 2, first, rows, H);
        prefetch_gated_rows(scan, &prefetch, scan->grad_out, t - 1, first, rows, H);
        prefetch_gated_rows(scan, &prefetch, scan->xp, t - 1, first, rows, 3 * H);
        prefetch_gated_rows(scan, &prefetch, scan->gates, t - 1, first, rows, kept_of(scan));
        matmul(work->to_sums, 3 * H, &shared->weight, work->grad_h, padded, rows, &prefetch);
    }
    for (int64_t i = 0; i < rows; i++)
        write_row(shared, scan->grad_h0 + (first + i) * H, work->grad_h + i * padded);
}

static void gated_walk(const void *context, int64_t block, real *memory)
{
    const GatedShared *shared = context;
    const GatedScan *scan = shared->scan;
    const int64_t first = block * scan->block, rows = scan->B - first < scan->block ? scan->B - first : scan->block;
    GatedWork work = {0};
    memset(memory, 0, lay_out_gated(shared, NULL, &(GatedWork){0}) * sizeof(real)); /* padding of all rows is zero */
    lay_out_gated(shared, memory, &work);
    (scan->backward ? gated_walk_backward : gated_walk_forward)(shared, first, rows, &work);
}

/* Lay out what all threads share in zeroed memory, and fill it; NULL only measures. Returns how many numbers it has. */
static int64_t prepare_gated(GatedShared *shared, real *memory)
{
    const GatedScan *scan = shared->scan;
    const int64_t H = scan->H, n = scan->head_size, K = scan->rotated;
    shared->size = 1;
    while (shared->size < n)
        shared->size *= 2;
    shared->width = padded_size((K + n - 1) / n * shared->size);
    shared->padded = padded_size(H);
    shared->in_place = shared->size == n && (K % n == 0 || (K == H && shared->width == shared->padded));
    const int64_t padded = shared->padded;
    GatedArena arena = {memory, 0};
    real *bias = take_row(&arena, 3 * padded), *rotates = take_row(&arena, shared->width), *rotated = take_row(&arena, padded);
    shared->bias = bias, shared->rotates = rotates, shared->rotated = rotated;
    const int64_t features = scan->features, steps = scan->T * scan->B, projects = features > 0 && !scan->backward;
    shared->window = projects && steps > DIRECT_ROWS ? DIRECT_ROWS / scan->block : 0;
    shared->projected = projects && !shared->window ? take_row(&arena, steps * 3 * H) : NULL;
    shared->xp = features > 0 ? shared->projected : scan->xp;
    const int64_t packs_input = shared->window > 0 || (scan->grad_x != NULL && steps > DIRECT_ROWS);
    real *bias_ih = shared->window > 0 ? take_row(&arena, 3 * padded) : NULL;
    shared->bias_ih = bias_ih;
    shared->weight_ih = scan->backward ? packed_shape(3 * H, padded_size(features)) : packed_shape(features, 3 * padded);
    shared->weight_ih.data = packs_input ? take_row(&arena, shared->weight_ih.K * shared->weight_ih.vectors * LANES) : NULL;
    shared->weight = scan->backward ? packed_shape(3 * H, padded) : packed_shape(H, 3 * padded);
    shared->direct = reads_directly(scan->T, scan->B);
    shared->weight.data = shared->direct ? NULL : take_row(&arena, shared->weight.K * shared->weight.vectors * LANES);
    if (memory == NULL)
        return arena.used;
    for (int64_t i = 0; scan->bias != NULL && i < 3; i++)
        memcpy(bias + i * padded, scan->bias + i * H, H * sizeof(real));
    for (int64_t i = 0; bias_ih != NULL && scan->bias_ih != NULL && i < 3; i++)
        memcpy(bias_ih + i * padded, scan->bias_ih + i * H, H * sizeof(real));
    if (packs_input && scan->backward)
        pack_straight(&shared->weight_ih, scan->weight_ih, features);
    else if (packs_input)
        pack_transposed(&shared->weight_ih, scan->weight_ih, features, H, padded);
    for (int64_t j = 0; j < K; j++)
        rotated[j] = 1;
    for (int64_t at = 0; at < (K + n - 1) / n * shared->size; at++)
        rotates[at] = units_of(shared, at) > 1;
    if (shared->direct)
        return arena.used;
    if (scan->backward)
        pack_straight(&shared->weight, scan->weight, H);
    else
        pack_transposed(&shared->weight, scan->weight, H, H, padded);
    return arena.used;
}

/* Project x of few rows: one thread's share of the units, for all rows and steps. */
static void project(const void *context, int64_t block, real *memory)
{
    const GatedShared *shared = context;
    const GatedScan *scan = shared->scan;
    const int64_t I = scan->features, units = 3 * scan->H, steps = scan->T * scan->B;
    const int64_t first = block * units / scan->threads, count = (block + 1) * units / scan->threads - first;
    const Rows x = pack_rows(scan->x, I, steps, I, memory);
    for (int64_t k = 0; scan->bias_ih != NULL && k < steps; k++)
        memcpy(shared->projected + k * units + first, scan->bias_ih + first, count * sizeof(real));
    add_products(scan->weight_ih + first * I, count, &x, shared->projected + first, units);
}

/* Gradients of DIRECT_ROWS rows of x. */
static void gated_grad_x(const void *context, int64_t block, real *memory)
{
    const GatedShared *shared = context;
    const GatedScan *scan = shared->scan;
    const int64_t I = scan->features, padded = padded_size(I), numbers = 3 * scan->H;
    const int64_t first = block * DIRECT_ROWS, left = scan->T * scan->B - first, rows = left < DIRECT_ROWS ? left : DIRECT_ROWS;
    memset(memory, 0, rows * padded * sizeof(real));
    matmul(scan->grad_xp + first * numbers, numbers, &shared->weight_ih, memory, padded, rows, NULL);
    for (int64_t i = 0; i < rows; i++)
        memcpy(scan->grad_x + (first + i) * I, memory + i * padded, I * sizeof(real));
}

/* The jobs behind the walk of a backward: gradients of the weights, of r and u and of tau, whose gradients xp has none
 * of, then of the input's, and of x. */
static int run_gated_backward(const GatedShared *shared, Job walk)
{
    const GatedScan *scan = shared->scan;
    const int64_t H = scan->H, steps = scan->T * scan->B, few = steps <= DIRECT_ROWS, projects = scan->features > 0;
    Source gates = {H, 2 * H, .first = scan->h0, .first_rows = scan->B, .x = scan->out, .to_weight = scan->grad_weight};
    Source target = gates, input = {scan->features, 3 * H, .x = scan->x, .to_weight = scan->grad_weight_ih};
    target.units = H;
    target.to_weight = scan->grad_weight + 2 * H * H;
    real *bias = scan->grad_bias;
    Gradient all[] = {
        {.rows = steps, .units = 2 * H, .grads = scan->grad_xp, .stride = 3 * H, .sources = {gates}, .to_bias = bias},
        {.rows = steps, .units = H, .grads = scan->grad_tau, .stride = H, .sources = {target},
         .to_bias = bias == NULL ? NULL : bias + 2 * H},
        {.rows = steps, .units = 3 * H, .grads = scan->grad_xp, .stride = 3 * H, .sources = {input}, .to_bias = scan->grad_bias_ih},
    };
    Job jobs[8] = {walk};
    int64_t count = 1;
    int failed = 0;
    for (int64_t i = 0; i < 2 + projects && !failed; i++) {
        if (few) {
            jobs[count++] = few_rows_job(&all[i]);
            continue;
        }
        failed = prepare_gradients(&all[i]);
        plan_gradients(&all[i], jobs + count);
        count += 2;
    }
    if (scan->grad_x != NULL && !few)
        jobs[count++] = (Job){gated_grad_x, shared, DIRECT_ROWS * padded_size(scan->features), (steps + DIRECT_ROWS - 1) / DIRECT_ROWS, 0, 0};
    failed = failed || run_threads(jobs, count, scan->threads);
    if (scan->grad_x != NULL && few && !failed) {
        memset(scan->grad_x, 0, steps * scan->features * sizeof(real));
        add_rows(scan->weight_ih, 3 * H, scan->features, scan->grad_xp, 3 * H, steps, scan->grad_x, scan->features);
    }
    for (int64_t i = 0; i < 3; i++)
        free(all[i].sums);
    return failed;
}

/* One gated scan, forward or backward; returns 0, or 1 where memory ran out. */
static int run_gated(const GatedScan *given)
{
    GatedScan own = *given, *scan = &own; /* with memory for what nobody asked for */
    const int64_t H = scan->H, steps = scan->T * scan->B;
    GatedShared shared = {.scan = scan};
    void *grads = NULL;
    if (scan->backward && scan->grad_xp == NULL) {
        if (posix_memalign(&grads, 64, (steps > 0 ? steps : 1) * 4 * H * sizeof(real)) != 0)
            return 1;
        scan->grad_xp = grads, scan->grad_tau = scan->grad_xp + steps * 3 * H;
    }
    real *memory = zeros(prepare_gated(&shared, NULL));
    if (memory == NULL) {
        free(grads);
        return 1;
    }
    prepare_gated(&shared, memory);
    advise_huge_pages(scan->backward ? scan->grad_xp : scan->out, steps * (scan->backward ? 3 : 1) * H);
    advise_huge_pages(scan->backward ? scan->grad_tau : scan->gates, steps * (scan->backward ? H : kept_of(scan)));
    advise_huge_pages(scan->out_copy, steps * H);
    advise_huge_pages(scan->grad_x, steps * scan->features);
    const Job walk = {gated_walk, &shared, lay_out_gated(&shared, NULL, &(GatedWork){0}), (scan->B + scan->block - 1) / scan->block, 0, 0};
    const Job first = {project, &shared, LANES + columns_size(steps, scan->features), scan->threads, 0, 0};
    Job jobs[] = {first, walk};
    const int64_t projected = shared.projected != NULL;
    int failed = scan->backward ? run_gated_backward(&shared, walk) : run_threads(jobs + !projected, 1 + projected, scan->threads);
    free(memory);
    free(grads);
    return failed;
}

#endif
