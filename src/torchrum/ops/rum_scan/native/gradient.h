/* Gradients of weights and a bias: sums over all rows of outer products.
 *
 * The work is cut into stripes of columns and segments of rows, by the sizes alone: results do not depend on how many
 * threads there are. */
#ifndef TORCHRUM_GRADIENT_H
#define TORCHRUM_GRADIENT_H

#include "matmul.h"
#include "threads.h"

#define PIECE 128        /* rows that are packed at a time */
#define WIDE 4           /* panels of a stripe: they share one packing of x */
#define MANY_UNITS 16    /* stripes times segments, where there are rows enough */
#define SEGMENT_ROWS 512 /* at least, so that adding up the segments costs little */
#define UNITS_AT_ONCE 64 /* units whose gradients a thread finds at a time, where there are few rows */

/* to_weight (units, features) = sum_k grads[k]^T x[k], of the first ``units`` columns of grads; no to_weight, no source. */
typedef struct {
    int64_t features, units;
    const real *first; /* x of the first ``first_rows`` rows, and of those behind them; NULL for zeros */
    int64_t first_rows;
    const real *x;
    real *to_weight;
} Source;

/* The gradients of up to two sources, and to_bias (units,) = sum_k grads[k], or NULL. */
typedef struct {
    int64_t rows, units;
    const real *grads; /* rows are ``stride`` apart */
    int64_t stride;
    Source sources[2];
    real *to_bias;
    int64_t vectors, panels, stripes, segments;
    int64_t depth; /* rows of a panel's sums: features of both sources, and the bias */
    real *sums;    /* (segments, panels, depth, PANEL vectors) */
} Gradient;

/* The first vector of columns of a panel. */
static int64_t first_vector(const Gradient *gradient, int64_t panel) { return panel * gradient->vectors / gradient->panels; }

/* Pack ``count`` rows of a panel, with zeros behind the last column, and add them to ``sum``. */
static void pack_panel(const Gradient *gradient, int64_t row, int64_t count, int64_t panel, real *packed, real *sum)
{
    const int64_t start = first_vector(gradient, panel), width = first_vector(gradient, panel + 1) - start;
    const int64_t column = start * LANES, left = gradient->units - column - (width - 1) * LANES;
    const real *source = gradient->grads + row * gradient->stride + column, *end = gradient->grads + gradient->rows * gradient->stride;
    mask within = {0};
    vec total[PANEL] = {{0}};
    for (int64_t i = 0; i < LANES; i++)
        within[i] = i < left ? -1 : 0;
    for (int64_t k = 0; k < count; k++, source += gradient->stride, packed += width * LANES) {
        const real *last = source + (width - 1) * LANES;
        vec value = {0};
        for (int64_t j = 0; j < width - 1; j++) {
            store(packed + j * LANES, load_loose(source + j * LANES));
            total[j] += load_loose(source + j * LANES);
        }
        if (last + LANES <= end)
            value = choose(within, load_loose(last), value);
        else
            memcpy(&value, last, (left < LANES ? left : LANES) * sizeof(real));
        store(packed + (width - 1) * LANES, value);
        total[width - 1] += value;
    }
    for (int64_t j = 0; j < width; j++)
        store(sum + j * LANES, load(sum + j * LANES) + total[j]);
}

/* Rows ``row`` to ``row + count`` of the panels ``from`` to ``to``, packed. */
typedef struct {
    int64_t row, count, from, to;
    const real *x;          /* the rows of a source, and where its sums begin */
    int64_t place;
    real *packed, *columns; /* (to - from, PIECE, PANEL vectors), and a buffer for columns of x */
    real *sums;             /* the segment's */
} Piece;

/* The part of ROWS columns of x, a constant, from the i-th one. While it computes it asks for the next columns of x and
 * for rows of the next piece. */
INLINE void add_columns(const int ROWS, const Gradient *gradient, const Source *source, const Piece *piece, int64_t i)
{
    const int64_t features = source->features, wide = PANEL * LANES, panels = piece->to - piece->from;
    const real *next = gradient->grads + (piece->row + piece->count) * gradient->stride + first_vector(gradient, piece->from) * LANES;
    for (int64_t k = 0; k < piece->count; k++)
        memcpy(piece->columns + k * ROWS, piece->x + k * features + i, ROWS * sizeof(real));
    for (int64_t p = piece->from; p < piece->to && first_vector(gradient, p) * LANES < source->units; p++) {
        const int64_t at = p - piece->from, width = first_vector(gradient, p + 1) - first_vector(gradient, p);
        const Lines columns = {(const char *)(piece->x + i + ROWS), features * (int64_t)sizeof(real)};
        const Lines rows = {(const char *)next + ((piece->place + i) / TILE_ROWS * panels + at) * LINE,
                            gradient->stride * (int64_t)sizeof(real)};
        tile_of_width(ROWS, width, piece->columns, 1, ROWS, piece->packed + at * PIECE * wide, piece->count,
                      piece->sums + (p * gradient->depth + piece->place + i) * wide, wide, columns, rows);
    }
}

/* One stripe of one segment. */
static void gradient_unit(const void *context, int64_t unit, real *work)
{
    const Gradient *gradient = context;
    const int64_t stripe = unit % gradient->stripes, segment = unit / gradient->stripes, wide = PANEL * LANES;
    const int64_t first_rows = gradient->sources[0].first_rows, end = (segment + 1) * gradient->rows / gradient->segments;
    Piece piece = {.row = segment * gradient->rows / gradient->segments, .from = stripe * gradient->panels / gradient->stripes,
                   .to = (stripe + 1) * gradient->panels / gradient->stripes, .packed = work, .columns = work + WIDE * PIECE * wide,
                   .sums = gradient->sums + segment * gradient->panels * gradient->depth * wide};
    for (; piece.row < end; piece.row += piece.count) {
        const int64_t stop = piece.row < first_rows && first_rows < end ? first_rows : end;
        piece.count = stop - piece.row < PIECE ? stop - piece.row : PIECE;
        for (int64_t p = piece.from; p < piece.to; p++)
            pack_panel(gradient, piece.row, piece.count, p, work + (p - piece.from) * PIECE * wide,
                       piece.sums + ((p + 1) * gradient->depth - 1) * wide);
        piece.place = 0;
        for (int i = 0; i < 2 && gradient->sources[i].to_weight != NULL; piece.place += gradient->sources[i++].features) {
            const Source *source = &gradient->sources[i];
            const int behind = piece.row >= source->first_rows;
            if (!behind && source->first == NULL)
                continue;
            piece.x = behind ? source->x + (piece.row - source->first_rows) * source->features
                             : source->first + piece.row * source->features;
#define ADD(ROWS, i) add_columns(ROWS, gradient, source, &piece, i)
            WITH_TILES(source->features, ADD);
#undef ADD
        }
    }
}

/* Add up the segments of a panel, and put the sums in their places, transposed. */
static void collect_panel(const void *context, int64_t panel, real *work)
{
    const Gradient *gradient = context;
    const int64_t wide = PANEL * LANES, numbers = gradient->depth * wide, start = first_vector(gradient, panel) * LANES;
    const int64_t end = first_vector(gradient, panel + 1) * LANES, stop = end < gradient->units ? end : gradient->units;
    real *sums = gradient->sums + panel * numbers;
    (void)work;
    for (int64_t segment = 1; segment < gradient->segments; segment++)
        for (int64_t i = 0; i < numbers; i += LANES)
            store(sums + i, load(sums + i) + load(sums + segment * gradient->panels * numbers + i));
    for (int64_t unit = start; unit < stop; unit++) {
        const real *sum = sums + unit - start;
        for (int i = 0; i < 2 && gradient->sources[i].to_weight != NULL; sum += gradient->sources[i++].features * wide) {
            const Source *source = &gradient->sources[i];
            for (int64_t k = 0; unit < source->units && k < source->features; k++)
                source->to_weight[unit * source->features + k] = sum[k * wide];
        }
        if (gradient->to_bias != NULL)
            gradient->to_bias[unit] = *sum;
    }
}

/* Cut the work, and take memory for it; 1 where there is none. */
static int prepare_gradients(Gradient *gradient)
{
    gradient->vectors = padded_size(gradient->units) / LANES;
    gradient->panels = (gradient->vectors + PANEL - 1) / PANEL;
    gradient->stripes = (gradient->panels + WIDE - 1) / WIDE;
    gradient->segments = MANY_UNITS / gradient->stripes;
    if (gradient->segments > gradient->rows / SEGMENT_ROWS)
        gradient->segments = gradient->rows / SEGMENT_ROWS;
    if (gradient->segments > 4)
        gradient->segments -= gradient->segments % 4; /* so that two or four threads get equal shares */
    if (gradient->segments < 1)
        gradient->segments = 1;
    gradient->depth = 1;
    for (int i = 0; i < 2 && gradient->sources[i].to_weight != NULL; i++)
        gradient->depth += gradient->sources[i].features;
    gradient->sums = zeros(gradient->segments * gradient->panels * gradient->depth * PANEL * LANES);
    return gradient->sums == NULL;
}

/* The gradients of ``step`` units of few rows, OUTER_UNITS or 1, straight to their places: nothing need be prepared. */
static void few_rows_step(const Gradient *gradient, int64_t unit, int64_t step)
{
    real scale[DIRECT_ROWS][OUTER_UNITS], sums[OUTER_UNITS] = {0};
    for (int64_t k = 0; k < gradient->rows; k++)
        for (int64_t i = 0; i < step; i++)
            sums[i] += scale[k][i] = gradient->grads[k * gradient->stride + unit + i];
    if (gradient->to_bias != NULL)
        memcpy(gradient->to_bias + unit, sums, step * sizeof(real));
    for (int i = 0; i < 2 && gradient->sources[i].to_weight != NULL; i++) {
        const Source *source = &gradient->sources[i];
        const int64_t features = source->features, skipped = source->first == NULL ? source->first_rows : 0;
        const real *x[DIRECT_ROWS];
        for (int64_t k = skipped; k < gradient->rows; k++)
            x[k] = k < source->first_rows ? source->first + k * features : source->x + (k - source->first_rows) * features;
        real *target = source->to_weight + unit * features;
        if (unit < source->units && step == OUTER_UNITS)
            write_outer(OUTER_UNITS, target, features, scale + skipped, x + skipped, gradient->rows - skipped);
        else if (unit < source->units)
            write_outer(1, target, features, scale + skipped, x + skipped, gradient->rows - skipped);
    }
}

static void few_rows_unit(const void *context, int64_t block, real *work)
{
    const Gradient *gradient = context;
    const int64_t stop = (block + 1) * UNITS_AT_ONCE, end = stop < gradient->units ? stop : gradient->units;
    (void)work;
    for (int64_t unit = block * UNITS_AT_ONCE, step; unit < end; unit += step) {
        const int64_t first = gradient->sources[0].units, last = unit < first && first < end ? first : end;
        step = unit + OUTER_UNITS <= last ? OUTER_UNITS : 1;
        few_rows_step(gradient, unit, step);
    }
}

static Job few_rows_job(const Gradient *gradient)
{
    return (Job){few_rows_unit, gradient, LANES, (gradient->units + UNITS_AT_ONCE - 1) / UNITS_AT_ONCE, 0, 0};
}

/* The two jobs that compute prepared gradients. */
static void plan_gradients(const Gradient *gradient, Job jobs[2])
{
    jobs[0] = (Job){gradient_unit, gradient, (WIDE * PANEL * LANES + TILE_ROWS) * PIECE, gradient->segments * gradient->stripes, 0, 0};
    jobs[1] = (Job){collect_panel, gradient, LANES, gradient->panels, 0, 0};
}

#endif
