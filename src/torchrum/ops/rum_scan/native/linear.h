/* The projection of the input, for all steps at once; and copies. */
#ifndef TORCHRUM_LINEAR_H
#define TORCHRUM_LINEAR_H

#include "matmul.h"
#include "threads.h"

#define LINEAR_ROWS 64 /* that a thread takes at a time; a multiple of STRIPE */
#define STRIPE 16      /* rows whose results stay in the cache until they are written */

/* y (rows, units) = x (rows, features) weight^T (features, units) + bias */
typedef struct {
    int64_t rows, features, units;
    const real *x, *bias;
    real *y;
    Packed weight;
} Linear;

static void linear_rows(const void *context, int64_t block, real *work)
{
    const Linear *linear = context;
    const int64_t units = linear->units, padded = linear->weight.vectors * LANES;
    const int64_t end = (block + 1) * LINEAR_ROWS < linear->rows ? (block + 1) * LINEAR_ROWS : linear->rows;
    for (int64_t first = block * LINEAR_ROWS; first < end; first += STRIPE) {
        const int64_t rows = end - first < STRIPE ? end - first : STRIPE;
        for (int64_t i = 0; i < rows; i++) {
            if (linear->bias != NULL)
                memcpy(work + i * padded, linear->bias, units * sizeof(real));
            else
                memset(work + i * padded, 0, units * sizeof(real));
        }
        matmul(linear->x + first * linear->features, linear->features, &linear->weight, work, padded, rows, NULL);
        for (int64_t i = 0; i < rows; i++)
            memcpy(linear->y + (first + i) * units, work + i * padded, units * sizeof(real));
    }
}

/* Run it with threads; frees the packed weight. */
static int multiply_rows(int64_t rows, int64_t features, int64_t units, const real *x, Packed weight, const real *bias,
                         real *y, int64_t threads)
{
    Linear linear = {rows, features, units, x, bias, y, weight};
    expect_writes(y, rows * units);
    Job job = {linear_rows, &linear, STRIPE * weight.vectors * LANES, (rows + LINEAR_ROWS - 1) / LINEAR_ROWS, 0, 0};
    int failed = run_threads(&job, 1, threads);
    free(weight.data);
    return failed;
}

#define COPY_NUMBERS (1 << 16) /* that a thread takes at a time */

typedef struct {
    int64_t numbers;
    const real *x;
    real *y;
} Copy;

static void copy_numbers(const void *context, int64_t block, real *work)
{
    const Copy *copy = context;
    const int64_t start = block * COPY_NUMBERS, rest = copy->numbers - start;
    (void)work;
    memcpy(copy->y + start, copy->x + start, (rest < COPY_NUMBERS ? rest : COPY_NUMBERS) * sizeof(real));
}

#endif
