/* The RUM scan on a CPU: entry points for ctypes, and threads. No state outlives a call, so that several threads may call
 * at once and a forked process may go on. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "walk.h"

typedef struct {
    const Shared *shared;
    int64_t blocks;
    atomic_int_least64_t next; /* block to take: a thread that is held up takes fewer */
    atomic_int_least64_t done;
} Job;

static real *zeros(int64_t size)
{
    real *memory = NULL;
    if (posix_memalign((void **)&memory, 64, size * sizeof(real)) != 0)
        return NULL;
    memset(memory, 0, size * sizeof(real));
    return memory;
}

static void *run_blocks(void *argument)
{
    Job *job = argument;
    Work work = {0};
    real *memory = zeros(lay_out(job->shared, NULL, &work));
    if (memory == NULL)
        return NULL; /* the others do the work */
    lay_out(job->shared, memory, &work);
    for (;;) {
        int64_t block = atomic_fetch_add(&job->next, 1);
        if (block >= job->blocks)
            break;
        if (job->shared->scan->backward)
            walk_backward(job->shared, block, &work);
        else
            walk_forward(job->shared, block, &work);
        atomic_fetch_add(&job->done, 1);
    }
    free(memory);
    return NULL;
}

/* Take the job with up to ``threads`` threads, this one among them; 0 if all of it was done. */
static int run_threads(Job *job, int64_t threads)
{
    enum { MOST = 256 };
    pthread_t others[MOST];
    int64_t started = 0, wanted = threads < job->blocks ? threads : job->blocks;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads that others made */
    while (started < MOST && started + 1 < wanted && pthread_create(&others[started], NULL, run_blocks, job) == 0)
        started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    run_blocks(job);
    for (int64_t i = 0; i < started; i++)
        pthread_join(others[i], NULL);
    return job->done < job->blocks;
}

/* One scan, forward or backward. Returns 0, or 1 where memory ran out. */
__attribute__((visibility("default"))) int torchrum_scan(const Scan *scan)
{
    const int64_t H = scan->H, gates = scan->gates, padded = (H + LANES - 1) / LANES * LANES;
    Shared shared = {.scan = scan, .padded = padded};
    shared.weight = scan->backward ? packed_shape(gates * H, padded) : packed_shape(H, gates * padded);
    const int64_t norms = scan->layer_norm ? 2 * (gates + 1) * padded : 0;
    const int64_t weights = shared.weight.K * shared.weight.vectors * LANES;
    real *memory = zeros(padded + norms + weights);
    if (memory == NULL)
        return 1;
    real *inside = memory, *gain = inside + padded, *shift = gain + norms / 2;
    shared.weight.data = gain + norms;
    for (int64_t j = 0; j < H; j++)
        inside[j] = 1;
    for (int64_t block = 0; scan->layer_norm && block <= gates; block++) {
        memcpy(gain + block * padded, scan->ln_weight + block * H, H * sizeof(real));
        memcpy(shift + block * padded, scan->ln_bias + block * H, H * sizeof(real));
    }
    if (scan->backward)
        pack_straight(&shared.weight, scan->weight, H);
    else
        pack_transposed(&shared.weight, scan->weight, H, padded);
    shared.inside = inside;
    shared.gain = gain;
    shared.shift = shift;
    Job job = {.shared = &shared, .blocks = (scan->B + scan->block - 1) / scan->block};
    int failed = run_threads(&job, scan->threads);
    free(memory);
    return failed;
}
