/* Threads for one call: they are started, take blocks of work, and are joined. No state outlives a call, so that several
 * threads may call at once and a forked process may go on. */
#ifndef TORCHRUM_THREADS_H
#define TORCHRUM_THREADS_H

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "vector.h"

typedef struct {
    void (*run)(const void *context, int64_t block, real *work);
    const void *context;
    int64_t work; /* numbers of a thread's own memory */
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
static void advise_huge_pages(real *memory, int64_t size)
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

/* Jobs of one call, one after another: each needs all of the one before. */
typedef struct {
    Job *jobs;
    int64_t count, size;
    real *work; /* ``size`` numbers for each thread */
    atomic_int_least64_t threads;
} Call;

static void *take_blocks(void *argument)
{
    Call *call = argument;
    real *work = call->work + atomic_fetch_add(&call->threads, 1) * call->size;
    memset(work, 0, call->size * sizeof(real)); /* here: whoever touches memory first has it near */
    for (Job *job = call->jobs; job < call->jobs + call->count; job++) {
        for (int64_t block; (block = atomic_fetch_add(&job->next, 1)) < job->blocks;) {
            job->run(job->context, block, work);
            atomic_fetch_add(&job->done, 1);
        }
        while (job + 1 < call->jobs + call->count && atomic_load(&job->done) < job->blocks)
            sched_yield();
    }
    return NULL;
}

/* Do the jobs with up to ``threads`` threads, this one among them; 1 where memory ran out. */
static int run_threads(Job *jobs, int64_t count, int64_t threads)
{
    enum { MAX_THREADS = 256 };
    pthread_t others[MAX_THREADS];
    Call call = {jobs, count, 0, NULL, 0};
    int64_t started = 0, wanted = threads < jobs->blocks ? threads : jobs->blocks;
    wanted = wanted < 1 ? 1 : wanted > MAX_THREADS ? MAX_THREADS : wanted;
    for (int64_t i = 0; i < count; i++)
        call.size = call.size > jobs[i].work ? call.size : jobs[i].work;
    call.size = (call.size + 63) / 64 * 64; /* threads share no line */
    /* one piece, of this thread's: those of short-lived threads would come from the system each time */
    if (posix_memalign((void **)&call.work, 64, wanted * call.size * sizeof(real)) != 0)
        return 1;
    if (wanted > 1) { /* else two calls of the system would cost a small step a tenth of its time */
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads that others made */
        while (started + 1 < wanted && pthread_create(&others[started], NULL, take_blocks, &call) == 0)
            started++;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    take_blocks(&call);
    for (int64_t i = 0; i < started; i++)
        pthread_join(others[i], NULL);
    free(call.work);
    return 0;
}

#endif
