/* A block of rows of the batch walks through all steps by itself: no thread waits for another. */
#ifndef TORCHRUM_WALK_H
#define TORCHRUM_WALK_H

#include "memory.h"

/* What one thread writes to, in padded rows that are zero at first. */
typedef struct {
    real *h, *raw;       /* (block, padded), (block, gates + 1, padded): raw gates and eps */
    real *grad_h, *sums; /* (block, padded), (2, gates + 1, padded) */
    real *R, *K;         /* (block, H, padded) */
    real *pending;       /* (block, 4, padded) */
    real *y, *z, *products;
    real *grad_x;        /* (block, features), rows padded */
    real *columns;       /* for add_products */
    Row row;
    Plane plane;
} Work;

typedef struct {
    real *start; /* NULL only measures */
    int64_t used;
} Arena;

static real *take(Arena *arena, int64_t size)
{
    int64_t at = arena->used;
    arena->used += size;
    return arena->start ? arena->start + at : NULL;
}

/* Lay out a thread's workspace; returns how many numbers it has. */
static int64_t lay_out(const Shared *shared, real *start, Work *work)
{
    const Scan *scan = shared->scan;
    const int64_t padded = shared->padded, block = scan->block, backward = scan->backward;
    Arena arena = {start, 0};
    Row *row = &work->row;
    real **rows[] = {&row->eps,  &row->tau,          &row->u,      &row->candidate, &row->total,  &row->squashed, &row->keep,
                     &row->grad, &row->to_candidate, &row->to_tau, &row->to_u,      &row->to_eps, &row->skipped};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        *rows[i] = take(&arena, padded);
    row->scratch = take(&arena, 3 * padded);
    work->h = take(&arena, block * padded);
    work->raw = take(&arena, block * (scan->gates + 1) * padded);
    work->grad_h = take(&arena, backward * block * padded);
    work->sums = take(&arena, backward * 2 * (scan->gates + 1) * padded);
    work->grad_x = take(&arena, backward * block * padded_size(scan->features));
    if (shared->direct && !backward)
        work->columns = take(&arena, padded_size(columns_size(block, scan->H > scan->features ? scan->H : scan->features)));
    if (scan->R_n != NULL) {
        work->pending = take(&arena, block * 4 * padded);
        work->y = take(&arena, 2 * padded);
        work->z = take(&arena, padded);
        work->products = take(&arena, 5 * padded);
        work->plane.e = take(&arena, padded);
        work->plane.n = take(&arena, 2 * padded);
        work->plane.w = take(&arena, padded);
        work->R = take(&arena, block * scan->H * padded);
        work->K = take(&arena, backward * block * scan->H * padded);
    }
    return arena.used;
}

static int is_over(const Scan *scan, int64_t t, int64_t b) { return scan->lengths != NULL && t >= scan->lengths[b]; }

/* A block's rows of a tensor (T, B, numbers), or of NULL, at another step. */
static void prefetch_rows(const Scan *scan, Prefetch *prefetch, const real *x, int64_t t, int64_t first, int64_t rows, int64_t numbers)
{
    if (x != NULL && t >= 0 && t < scan->T)
        add_prefetch(prefetch, x + (t * scan->B + first) * numbers, rows * numbers);
}

/* Raw gates and eps of a block's rows: what step ``t`` reads, times the input's weight or given, and the state's share. */
static void find_raw(const Shared *shared, const Work *work, int64_t t, int64_t first, int64_t rows)
{
    const Scan *scan = shared->scan;
    const int64_t H = scan->H, padded = shared->padded, gates = scan->gates, features = scan->features;
    const int64_t stride = (gates + 1) * padded, at = t * scan->B + first;
    for (int64_t i = 0; i < rows; i++)
        for (int64_t part = 0; part <= gates; part++) {
            real *raw = work->raw + i * stride + part * padded;
            if (features == 0)
                fetch(shared, raw, scan->xp + ((at + i) * (gates + 1) + part) * H);
            else
                memcpy(raw, shared->bias + part * padded, padded * sizeof(real));
        }
    if (shared->direct && features > 0) {
        const Rows x = pack_rows(scan->x + at * features, features, rows, features, work->columns);
        for (int64_t part = 0; part <= gates; part++)
            add_products(scan->weight_ih + part * H * features, H, &x, work->raw + part * padded, stride);
    }
    if (shared->direct && (t > 0 || scan->h0 != NULL)) {
        const Rows states = pack_rows(work->h, padded, rows, H, work->columns);
        for (int64_t part = 0; part < gates; part++)
            add_products(scan->weight + part * H * H, H, &states, work->raw + part * padded, stride);
    }
    if (shared->direct)
        return;
    if (features > 0)
        matmul(scan->x + at * features, features, &shared->weight_ih, work->raw, stride, rows, NULL);
    Prefetch prefetch = {.count = 0};
    prefetch_rows(scan, &prefetch, scan->kept, t, first, rows, 2 * H);
    prefetch_rows(scan, &prefetch, scan->saved, t, first, rows, saved_rows(scan) * H);
    prefetch_rows(scan, &prefetch, scan->out_copy, t, first, rows, H);
    prefetch_rows(scan, &prefetch, scan->out, t, first, rows, H);
    prefetch_rows(scan, &prefetch, scan->x, t + 1, first, rows, features);
    prefetch_rows(scan, &prefetch, scan->xp, t + 1, first, rows, (gates + 1) * H); /* first of all: a read must wait for it */
    matmul(work->h, padded, &shared->weight, work->raw, stride, rows, &prefetch);
}

/* Gates, rotation and mixing of one row; ``raw`` has its raw gates and eps, ``h`` its state, which becomes the new one. */
static void step_forward(const Shared *shared, Work *work, int64_t t, int64_t b, real *raw, real *h, real *R,
                         Pending pending)
{
    const Scan *scan = shared->scan;
    const int64_t H = scan->H, padded = shared->padded, gates = scan->gates, at = t * scan->B + b;
    Row row = work->row;
    real *saved = scan->saved == NULL ? NULL : scan->saved + at * saved_rows(scan) * H;
    row.eps = raw + gates * padded;
    if (scan->layer_norm)
        normalise(shared, 0, raw, row.tau);
    else
        row.tau = raw;
    if (R == NULL) {
        rotate(shared, find_angle(shared, &row, h), &row, h);
    } else {
        find_plane(shared, &row, &work->plane);
        rotate_memory(shared, &work->plane, h, R, pending, work->products, work->z);
        for (int64_t j = 0; j < padded; j += LANES)
            store(row.total + j, load(row.eps + j) + load(work->z + j));
        if (saved != NULL) {
            put(shared, saved + gates * H, work->z);
            put(shared, scan->kept + at * 2 * H, pending.y_e);
            put(shared, scan->kept + (at * 2 + 1) * H, pending.y_n);
        }
    }
    find_candidate(shared, &row);
    if (gates == 2)
        find_gate(shared, raw + padded, &row);
    if (saved != NULL)
        put(shared, saved, raw);
    if (saved != NULL && gates == 2)
        put(shared, saved + H, scan->layer_norm ? raw + padded : row.u);
    if (saved != NULL && scan->features > 0)
        put(shared, saved + (saved_rows(scan) - 1) * H, row.eps);
    advance(shared, t, b, &row, h);
}

/* A row past its length keeps its state; what the backward will not read is zero. */
static void skip_forward(const Scan *scan, int64_t t, int64_t b)
{
    const int64_t H = scan->H, at = t * scan->B + b, numbers = saved_rows(scan) * H;
    if (scan->saved != NULL)
        memset(scan->saved + at * numbers, 0, numbers * sizeof(real));
    if (scan->kept != NULL)
        memset(scan->kept + at * 2 * H, 0, 2 * H * sizeof(real));
}

/* One row's matrix to its padded place. */
static void load_matrix(const Shared *shared, real *R, const real *source)
{
    for (int64_t i = 0; i < shared->scan->H; i++)
        fetch(shared, R + i * shared->padded, source + i * shared->scan->H);
}

/* The same, transposed as the forward has R; NULL is the identity. */
static void load_transposed(const Shared *shared, real *R, const real *source)
{
    const int64_t H = shared->scan->H, padded = shared->padded;
    memset(R, 0, H * padded * sizeof(real));
    for (int64_t i = 0; i < H; i++) {
        if (source == NULL)
            R[i * padded + i] = 1;
        for (int64_t j = 0; source != NULL && j < H; j++)
            R[i * padded + j] = source[j * H + i];
    }
}

/* One row's R, transposed and up to what is pending, to its place in a tensor. */
static void store_matrix(const Shared *shared, real *target, real *R, Pending pending)
{
    const int64_t H = shared->scan->H, padded = shared->padded;
    for (int64_t j = 0; j < H; j++)
        for (int64_t i = 0; i < padded; i += LANES) {
            vec added = load(pending.y_e + i) * pending.e[j] + load(pending.y_n + i) * pending.n[j];
            store(R + j * padded + i, load(R + j * padded + i) - 2 * added);
        }
    for (int64_t i = 0; i < H; i++)
        for (int64_t j = 0; j < H; j++)
            target[i * H + j] = R[j * padded + i];
}

static void walk_forward(const Shared *shared, int64_t block, Work *work)
{
    const Scan *scan = shared->scan;
    const int64_t H = scan->H, padded = shared->padded, gates = scan->gates, matrix = H * padded;
    const int64_t first = block * scan->block;
    const int64_t rows = scan->B - first < scan->block ? scan->B - first : scan->block;
    for (int64_t i = 0; i < rows; i++) {
        if (scan->h0 != NULL)
            fetch(shared, work->h + i * padded, scan->h0 + (first + i) * H);
        else
            memset(work->h + i * padded, 0, padded * sizeof(real));
        if (scan->R_n != NULL) {
            if (i > 0 && scan->R0_stride == 0)
                memcpy(work->R + i * matrix, work->R, matrix * sizeof(real));
            else
                load_transposed(shared, work->R + i * matrix,
                                scan->R0 == NULL ? NULL : scan->R0 + (first + i) * scan->R0_stride);
            memset(work->pending + i * 4 * padded, 0, 4 * padded * sizeof(real));
        }
    }
    for (int64_t t = 0; t < scan->T; t++) {
        find_raw(shared, work, t, first, rows);
        for (int64_t i = 0; i < rows; i++) {
            real *h = work->h + i * padded, *R = scan->R_n == NULL ? NULL : work->R + i * matrix;
            if (is_over(scan, t, first + i))
                skip_forward(scan, t, first + i);
            else
                step_forward(shared, work, t, first + i, work->raw + i * (gates + 1) * padded, h, R,
                             pending_of(work->pending + i * 4 * padded, padded));
            put(shared, scan->out + (t * scan->B + first + i) * H, h);
            if (scan->out_copy != NULL)
                put(shared, scan->out_copy + (t * scan->B + first + i) * H, h);
        }
    }
    for (int64_t i = 0; scan->last != NULL && i < rows; i++)
        put(shared, scan->last + (first + i) * H, work->h + i * padded);
    for (int64_t i = 0; scan->R_n != NULL && i < rows; i++) {
        real *R_n = scan->R_n + (first + i) * H * H;
        store_matrix(shared, R_n, work->R + i * matrix, pending_of(work->pending + i * 4 * padded, padded));
        if (scan->R_copy != NULL)
            memcpy(scan->R_copy + (first + i) * H * H, R_n, H * H * sizeof(real));
    }
}

/* Gradients of one step of one row; ``grad_h`` is that of the new state and becomes that of the old one, up to what
 * passes through the recurrent weight. */
static void step_backward(const Shared *shared, Work *work, int64_t t, int64_t b, real *h, real *grad_h, real *R, real *K)
{
    const Scan *scan = shared->scan;
    const int64_t H = scan->H, padded = shared->padded, gates = scan->gates, at = t * scan->B + b;
    const real *saved = scan->saved + at * saved_rows(scan) * H;
    Row row = work->row;
    real *raw = work->raw, *grad_xp = scan->grad_xp + at * (gates + 1) * H;
    Angle angle = {0};
    Moments of_tau = {0}, of_gate = {0}, of_candidate;
    fetch(shared, raw, saved);
    if (gates == 2)
        fetch(shared, scan->layer_norm ? raw + padded : row.u, saved + H);
    fetch(shared, row.eps,
          scan->features > 0 ? saved + (saved_rows(scan) - 1) * H : scan->xp + (at * (gates + 1) + gates) * H);
    if (scan->layer_norm)
        of_tau = normalise(shared, 0, raw, row.tau);
    else
        row.tau = raw;
    if (R == NULL) {
        angle = find_angle(shared, &row, h);
        rotate(shared, angle, &row, h);
    } else {
        fetch(shared, work->z, saved + gates * H);
        fetch(shared, work->y, scan->kept + at * 2 * H);
        fetch(shared, work->y + padded, scan->kept + (at * 2 + 1) * H);
        find_plane(shared, &row, &work->plane);
        for (int64_t j = 0; j < padded; j += LANES)
            store(row.total + j, load(row.eps + j) + load(work->z + j));
    }
    of_candidate = find_candidate(shared, &row);
    if (gates == 2 && scan->layer_norm)
        of_gate = find_gate(shared, raw + padded, &row);
    for (int64_t j = 0; j < padded; j += LANES)
        store(row.grad + j, load(grad_h + j));
    advance_backward(shared, t, b, &row, h);
    if (scan->layer_norm)
        normalise_backward(shared, gates, row.total, of_candidate, row.to_candidate, work->sums);
    if (R == NULL) {
        rotate_backward(shared, angle, &row, h, grad_h);
    } else {
        if (scan->grad_z != NULL)
            put(shared, scan->grad_z + at * H, row.to_candidate);
        rotate_memory_backward(shared, &work->plane, &row, R, K, work->y, work->z, work->products, grad_h);
    }
    if (scan->layer_norm)
        normalise_backward(shared, 0, raw, of_tau, row.to_tau, work->sums);
    if (gates == 2) {
        gate_backward(shared, raw + padded, of_gate, &row, work->sums);
        for (int64_t j = 0; j < padded; j += LANES)
            store(grad_h + j, load(grad_h + j) + load(row.grad + j) * load(row.u + j));
        put(shared, grad_xp + H, row.to_u);
    }
    if (scan->zoneout_kind != NO_ZONEOUT)
        for (int64_t j = 0; j < padded; j += LANES)
            store(grad_h + j, load(grad_h + j) + load(row.skipped + j));
    put(shared, grad_xp, row.to_tau);
    put(shared, grad_xp + gates * H, row.to_eps);
}

/* Gradients of a block's inputs at one step, from those of what they were projected to. */
static void find_grad_x(const Shared *shared, const Work *work, int64_t at, int64_t rows)
{
    const Scan *scan = shared->scan;
    const int64_t features = scan->features, padded = padded_size(features), numbers = (scan->gates + 1) * scan->H;
    memset(work->grad_x, 0, rows * padded * sizeof(real));
    matmul(scan->grad_xp + at * numbers, numbers, &shared->weight_ih, work->grad_x, padded, rows, NULL);
    for (int64_t i = 0; i < rows; i++)
        memcpy(scan->grad_x + (at + i) * features, work->grad_x + i * padded, features * sizeof(real));
}

static void walk_backward(const Shared *shared, int64_t block, Work *work)
{
    const Scan *scan = shared->scan;
    const int64_t H = scan->H, padded = shared->padded, gates = scan->gates, matrix = H * padded;
    const int64_t first = block * scan->block, has_memory = scan->R_n != NULL;
    const int64_t rows = scan->B - first < scan->block ? scan->B - first : scan->block;
    memset(work->grad_h, 0, rows * padded * sizeof(real));
    for (int64_t i = 0; scan->grad_last != NULL && i < rows; i++)
        fetch(shared, work->grad_h + i * padded, scan->grad_last + (first + i) * H);
    memset(work->sums, 0, 2 * (gates + 1) * padded * sizeof(real));
    for (int64_t i = 0; has_memory && i < rows; i++) {
        load_matrix(shared, work->R + i * matrix, scan->R_n + (first + i) * H * H);
        memset(work->K + i * matrix, 0, matrix * sizeof(real));
        if (scan->grad_K != NULL)
            load_matrix(shared, work->K + i * matrix, scan->grad_K + (first + i) * H * H);
    }
    for (int64_t t = scan->T - 1; t >= 0; t--) {
        real *grad_xp = scan->grad_xp + (t * scan->B + first) * (gates + 1) * H;
        for (int64_t i = 0; i < rows; i++) {
            const int64_t at = t * scan->B + first + i;
            real *grad_h = work->grad_h + i * padded, *R = has_memory ? work->R + i * matrix : NULL;
            if (scan->grad_out != NULL)
                fetch(shared, work->row.grad, scan->grad_out + at * H);
            for (int64_t j = 0; scan->grad_out != NULL && j < padded; j += LANES)
                store(grad_h + j, load(grad_h + j) + load(work->row.grad + j));
            if (is_over(scan, t, first + i)) {
                memset(grad_xp + i * (gates + 1) * H, 0, (gates + 1) * H * sizeof(real));
                if (scan->grad_z != NULL)
                    memset(scan->grad_z + at * H, 0, H * sizeof(real));
                continue;
            }
            const real *h = t > 0 ? scan->out + (at - scan->B) * H : scan->h0 == NULL ? NULL : scan->h0 + (first + i) * H;
            if (h != NULL)
                fetch(shared, work->h, h);
            else
                memset(work->h, 0, padded * sizeof(real));
            step_backward(shared, work, t, first + i, work->h, grad_h, R, has_memory ? work->K + i * matrix : NULL);
        }
        Prefetch prefetch = {.count = 0};
        prefetch_rows(scan, &prefetch, scan->grad_xp, t - 1, first, rows, (gates + 1) * H);
        prefetch_rows(scan, &prefetch, scan->out, t - 2, first, rows, H);
        prefetch_rows(scan, &prefetch, scan->grad_out, t - 1, first, rows, H);
        prefetch_rows(scan, &prefetch, scan->kept, t - 1, first, rows, 2 * H);
        prefetch_rows(scan, &prefetch, scan->xp, t - 1, first, rows, (gates + 1) * H);
        prefetch_rows(scan, &prefetch, scan->saved, t - 1, first, rows, saved_rows(scan) * H);
        if (scan->grad_x != NULL && !shared->few)
            find_grad_x(shared, work, t * scan->B + first, rows);
        if (t == 0 && scan->grad_h0 == NULL)
            break;
        if (shared->direct)
            add_rows(scan->weight, gates * H, H, grad_xp, (gates + 1) * H, rows, work->grad_h, padded);
        else
            matmul(grad_xp, (gates + 1) * H, &shared->weight, work->grad_h, padded, rows, &prefetch);
    }
    for (int64_t i = 0; scan->grad_h0 != NULL && i < rows; i++)
        put(shared, scan->grad_h0 + (first + i) * H, work->grad_h + i * padded);
    for (int64_t k = 0; scan->ln_sums != NULL && k < 2 * (gates + 1); k++)
        put(shared, scan->ln_sums + (block * 2 * (gates + 1) + k) * H, work->sums + k * padded);
}

#endif
