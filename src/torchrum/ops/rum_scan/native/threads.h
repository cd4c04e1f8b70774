/* Threads for one call: they are started, take blocks of work, and are joined. No state outlives a call, so that several
 * threads may call at once and a forked process may go on. */
#ifndef TORCHRUM_THREADS_H
#define TORCHRUM_THREADS_H

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "vector.h"

typedef struct {
    void (*run)(const void *context, int64_t block, real *work);
    const void *context;
    int64_t work; /* numbers of a thread's own memory, zero at first */
    int64_t blocks;
    atomic_int_least64_t next; /* block to take: a thread that is held up takes fewer */
    atomic_int_least64_t done;
} Job;

static real *zeros(int64_t size)
{
    void *memory = NULL;
    if (posix_memalign(&memory, 64, size * sizeof(real)) != 0)
        return NULL;
    return memset(memory, 0, size * sizeof(real));
}

/* Memory that is about to be written for the first time comes faster in large pages, where the system has them. */
static void expect_writes(real *memory, int64_t size)
{
#ifdef MADV_HUGEPAGE
    const uintptr_t page = 2 << 20;
    uintptr_t start = ((uintptr_t)memory + page - 1) / page * page, end = (uintptr_t)(memory + size) / page * page;
    if (memory != NULL && end > start)
        madvise((void *)start, end - start, MADV_HUGEPAGE);
#else
    (void)memory, (void)size;
#endif
}

static void *take_blocks(void *argument)
{
    Job *job = argument;
    real *work = zeros(job->work);
    if (work == NULL)
        return NULL; /* the others do the work */
    for (int64_t block; (block = atomic_fetch_add(&job->next, 1)) < job->blocks;) {
        job->run(job->context, block, work);
        atomic_fetch_add(&job->done, 1);
    }
    free(work);
    return NULL;
}

/* Do the job with up to ``threads`` threads, this one among them; 0 if all of it was done. */
static int run_threads(Job *job, int64_t threads)
{
    enum { MOST = 256 };
    pthread_t others[MOST];
    int64_t started = 0, wanted = threads < job->blocks ? threads : job->blocks;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads that others made */
    while (started < MOST && started + 1 < wanted && pthread_create(&others[started], NULL, take_blocks, job) == 0)
        started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    take_blocks(job);
    for (int64_t i = 0; i < started; i++)
        pthread_join(others[i], NULL);
    return job->done < job->blocks;
}

#endif
