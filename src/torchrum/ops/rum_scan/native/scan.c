/* Entry points for ctypes. Each returns 0, or 1 where memory ran out. */
#define _DEFAULT_SOURCE
#include "linear.h"
#include "walk.h"

#define EXPORT __attribute__((visibility("default")))

static void walk(const void *context, int64_t block, real *memory)
{
    const Shared *shared = context;
    Work work = {0};
    lay_out(shared, memory, &work);
    if (shared->scan->backward)
        walk_backward(shared, block, &work);
    else
        walk_forward(shared, block, &work);
}

/* What all threads share, in one piece of memory; NULL where there is none. */
static real *prepare(Shared *shared)
{
    const Scan *scan = shared->scan;
    const int64_t H = scan->H, gates = scan->gates, padded = padded_size(H);
    shared->padded = padded;
    shared->weight = scan->backward ? packed_shape(gates * H, padded) : packed_shape(H, gates * padded);
    const int64_t norms = scan->layer_norm ? (gates + 1) * padded : 0;
    real *inside = zeros(padded + 2 * norms + shared->weight.K * shared->weight.vectors * LANES);
    if (inside == NULL)
        return NULL;
    real *gain = inside + padded, *shift = gain + norms;
    shared->inside = inside;
    shared->gain = gain;
    shared->shift = shift;
    shared->weight.data = shift + norms;
    for (int64_t j = 0; j < H; j++)
        inside[j] = 1;
    for (int64_t i = 0; i < LANES; i++)
        shared->tail[i] = i < H % LANES ? LANES - H % LANES + i : LANES;
    for (int64_t block = 0; scan->layer_norm && block <= gates; block++) {
        memcpy(gain + block * padded, scan->ln_weight + block * H, H * sizeof(real));
        memcpy(shift + block * padded, scan->ln_bias + block * H, H * sizeof(real));
    }
    if (scan->backward)
        pack_straight(&shared->weight, scan->weight, H);
    else
        pack_transposed(&shared->weight, scan->weight, H, padded);
    return inside;
}

/* One scan, forward or backward. */
EXPORT int torchrum_scan(const Scan *scan)
{
    const int64_t H = scan->H, gates = scan->gates, steps = scan->T * scan->B;
    Shared shared = {.scan = scan};
    real *memory = prepare(&shared);
    if (memory == NULL)
        return 1;
    if (scan->backward) {
        expect_writes(scan->grad_xp, steps * (gates + 1) * H);
    } else {
        expect_writes(scan->out, steps * H);
        expect_writes(scan->saved, steps * (gates + (scan->R_n != NULL)) * H);
        expect_writes(scan->kept, steps * 2 * H);
    }
    Job job = {walk, &shared, 0, (scan->B + scan->block - 1) / scan->block, 0, 0};
    job.work = lay_out(&shared, NULL, &(Work){0});
    int failed = run_threads(&job, scan->threads);
    free(memory);
    return failed;
}

/* y (rows, units) = x (rows, features) weight^T + bias; bias may be NULL. */
EXPORT int torchrum_linear(int64_t rows, int64_t features, int64_t units, int64_t threads, const real *x,
                           const real *weight, const real *bias, real *y)
{
    const int64_t padded = padded_size(units);
    Linear linear = {rows, features, units, x, bias, y, packed_shape(features, padded)};
    linear.weight.data = zeros(features * padded);
    if (linear.weight.data == NULL)
        return 1;
    pack_transposed(&linear.weight, weight, units, padded);
    expect_writes(y, rows * units);
    Job job = {linear_rows, &linear, STRIPE * padded, (rows + LINEAR_ROWS - 1) / LINEAR_ROWS, 0, 0};
    int failed = run_threads(&job, threads);
    free(linear.weight.data);
    return failed;
}
