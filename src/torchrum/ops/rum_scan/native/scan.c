/* The entry point for ctypes. */
#define _DEFAULT_SOURCE

#include "gated.h"
#include "gradient.h"
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

/* Rows of parameters (count, H), or NULL, in padded ones. */
static real *pad(const Scan *scan, Arena *arena, const real *source, int64_t count)
{
    const int64_t padded = padded_size(scan->H);
    real *rows = take(arena, count * padded);
    for (int64_t i = 0; rows != NULL && source != NULL && i < count; i++)
        memcpy(rows + i * padded, source + i * scan->H, scan->H * sizeof(real));
    return rows;
}

/* Lay out what all threads share in zeroed memory, and fill it; NULL only measures. Returns how many numbers it has. */
static int64_t prepare(Shared *shared, real *memory)
{
    const Scan *scan = shared->scan;
    const int64_t H = scan->H, gates = scan->gates, padded = padded_size(H);
    Arena arena = {memory, 0};
    real *inside = take(&arena, padded);
    shared->padded = padded;
    shared->inside = inside;
    shared->gain = pad(scan, &arena, scan->ln_weight, scan->layer_norm ? gates + 1 : 0);
    shared->shift = pad(scan, &arena, scan->ln_bias, scan->layer_norm ? gates + 1 : 0);
    shared->bias = pad(scan, &arena, scan->bias, scan->features > 0 ? gates + 1 : 0);
    shared->few = scan->T * scan->B <= DIRECT_ROWS;
    shared->direct = reads_directly(scan->T, scan->B);
    if (!shared->direct) {
        shared->weight = scan->backward ? packed_shape(gates * H, padded) : packed_shape(H, gates * padded);
        shared->weight.data = take(&arena, shared->weight.K * shared->weight.vectors * LANES);
        shared->weight_ih = scan->backward ? packed_shape((gates + 1) * H, padded_size(scan->features))
                                           : packed_shape(scan->features, (gates + 1) * padded);
        shared->weight_ih.data = take(&arena, shared->weight_ih.K * shared->weight_ih.vectors * LANES);
    }
    if (memory == NULL)
        return arena.used;
    for (int64_t j = 0; j < H; j++)
        inside[j] = 1;
    for (int64_t i = 0; i < LANES; i++) {
        shared->tail[i] = i < H % LANES ? LANES - H % LANES + i : LANES;
        shared->overlap[i] = H % LANES + i;
    }
    if (shared->direct)
        return arena.used;
    if (scan->backward) {
        pack_straight(&shared->weight, scan->weight, H);
        if (scan->grad_x != NULL && !shared->few)
            pack_straight(&shared->weight_ih, scan->weight_ih, scan->features);
    } else {
        pack_transposed(&shared->weight, scan->weight, H, H, padded);
        if (scan->features > 0)
            pack_transposed(&shared->weight_ih, scan->weight_ih, scan->features, H, padded);
    }
    return arena.used;
}

/* One scan, forward or backward; returns 0, or 1 where memory ran out. */
EXPORT int torchrum_scan(const Scan *scan)
{
    const int64_t H = scan->H, gates = scan->gates, steps = scan->T * scan->B;
    Shared shared = {.scan = scan};
    real *memory = zeros(prepare(&shared, NULL));
    if (memory == NULL)
        return 1;
    prepare(&shared, memory);
    if (scan->backward) {
        advise_huge_pages(scan->grad_xp, steps * (gates + 1) * H);
        advise_huge_pages(scan->grad_x, steps * scan->features);
    } else {
        advise_huge_pages(scan->out, steps * H);
        advise_huge_pages(scan->out_copy, steps * H);
        advise_huge_pages(scan->saved, steps * saved_rows(scan) * H);
        advise_huge_pages(scan->kept, steps * 2 * H);
    }
    const Source recurrent = {H, gates * H, .first = scan->h0, .first_rows = scan->B, .x = scan->out, .to_weight = scan->grad_weight};
    const Source projected = {scan->features, (gates + 1) * H, .x = scan->x, .to_weight = scan->grad_weight_ih};
    Gradient gradient = {.rows = steps, .units = (gates + (scan->features > 0)) * H, .grads = scan->grad_xp,
                         .stride = (gates + 1) * H, .sources = {recurrent, projected}, .to_bias = scan->grad_bias};
    Job jobs[3] = {{walk, &shared, lay_out(&shared, NULL, &(Work){0}), (scan->B + scan->block - 1) / scan->block, 0, 0}};
    int64_t count = 1;
    int failed = 0;
    if (scan->backward && shared.few) {
        jobs[count++] = few_rows_job(&gradient);
    } else if (scan->backward) {
        failed = prepare_gradients(&gradient);
        plan_gradients(&gradient, jobs + 1);
        count = 3;
    }
    failed = failed || run_threads(jobs, count, scan->threads);
    if (scan->grad_x != NULL && shared.few && !failed) {
        memset(scan->grad_x, 0, steps * scan->features * sizeof(real));
        add_rows(scan->weight_ih, (gates + 1) * H, scan->features, scan->grad_xp, (gates + 1) * H, steps, scan->grad_x, scan->features);
    }
    free(gradient.sums);
    free(memory);
    return failed;
}

/* One scan of the gated form, forward or backward; likewise. */
EXPORT int torchrum_gated_scan(const GatedScan *scan) { return run_gated(scan); }
