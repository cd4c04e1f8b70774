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
    const real *first; /* x of the first ``ahead`` rows, and of those behind them; NULL for zeros */
    int64_t ahead;
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
static int64_t first_vector(const Gradient *it, int64_t panel) { return panel * it->vectors / it->panels; }

/* Pack ``count`` rows of a panel, with zeros behind the last column, and add them to ``sum``. */
static void pack_panel(const Gradient *it, int64_t row, int64_t count, int64_t panel, real *packed, real *sum)
{
    const int64_t start = first_vector(it, panel), width = first_vector(it, panel + 1) - start;
    const int64_t column = start * LANES, left = it->units - column - (width - 1) * LANES;
    const real *source = it->grads + row * it->stride + column, *end = it->grads + it->rows * it->stride;
    mask within = {0};
    vec total[PANEL] = {{0}};
    for (int64_t i = 0; i < LANES; i++)
        within[i] = i < left ? -1 : 0;
    for (int64_t k = 0; k < count; k++, source += it->stride, packed += width * LANES) {
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
INLINE void add_columns(const int ROWS, const Gradient *it, const Source *source, const Piece *piece, int64_t i)
{
    const int64_t features = source->features, wide = PANEL * LANES, panels = piece->to - piece->from;
    const real *next = it->grads + (piece->row + piece->count) * it->stride + first_vector(it, piece->from) * LANES;
    for (int64_t k = 0; k < piece->count; k++)
        memcpy(piece->columns + k * ROWS, piece->x + k * features + i, ROWS * sizeof(real));
    for (int64_t p = piece->from; p < piece->to && first_vector(it, p) * LANES < source->units; p++) {
        const int64_t at = p - piece->from, width = first_vector(it, p + 1) - first_vector(it, p);
        const Lines columns = {(const char *)(piece->x + i + ROWS), features * (int64_t)sizeof(real)};
        const Lines rows = {(const char *)next + ((piece->place + i) / TILE_ROWS * panels + at) * LINE,
                            it->stride * (int64_t)sizeof(real)};
        tile_of_width(ROWS, width, piece->columns, 1, ROWS, piece->packed + at * PIECE * wide, piece->count,
                      piece->sums + (p * it->depth + piece->place + i) * wide, wide, columns, rows);
    }
}

/* One stripe of one segment. */
static void gradient_unit(const void *context, int64_t unit, real *work)
{
    const Gradient *it = context;
    const int64_t stripe = unit % it->stripes, segment = unit / it->stripes, wide = PANEL * LANES;
    const int64_t ahead = it->sources[0].ahead, end = (segment + 1) * it->rows / it->segments;
    Piece piece = {.row = segment * it->rows / it->segments, .from = stripe * it->panels / it->stripes,
                   .to = (stripe + 1) * it->panels / it->stripes, .packed = work, .columns = work + WIDE * PIECE * wide,
                   .sums = it->sums + segment * it->panels * it->depth * wide};
    for (; piece.row < end; piece.row += piece.count) {
        const int64_t stop = piece.row < ahead && ahead < end ? ahead : end;
        piece.count = stop - piece.row < PIECE ? stop - piece.row : PIECE;
        for (int64_t p = piece.from; p < piece.to; p++)
            pack_panel(it, piece.row, piece.count, p, work + (p - piece.from) * PIECE * wide,
                       piece.sums + ((p + 1) * it->depth - 1) * wide);
        piece.place = 0;
        for (int i = 0; i < 2 && it->sources[i].to_weight != NULL; piece.place += it->sources[i++].features) {
            const Source *source = &it->sources[i];
            const int behind = piece.row >= source->ahead;
            if (!behind && source->first == NULL)
                continue;
            piece.x = behind ? source->x + (piece.row - source->ahead) * source->features
                             : source->first + piece.row * source->features;
#define ADD(ROWS, i) add_columns(ROWS, it, source, &piece, i)
            WITH_TILES(source->features, ADD);
#undef ADD
        }
    }
}

/* Add up the segments of a panel, and put the sums in their places, transposed. */
static void collect_panel(const void *context, int64_t panel, real *work)
{
    const Gradient *it = context;
    const int64_t wide = PANEL * LANES, numbers = it->depth * wide, start = first_vector(it, panel) * LANES;
    const int64_t end = first_vector(it, panel + 1) * LANES, stop = end < it->units ? end : it->units;
    real *sums = it->sums + panel * numbers;
    (void)work;
    for (int64_t segment = 1; segment < it->segments; segment++)
        for (int64_t i = 0; i < numbers; i += LANES)
            store(sums + i, load(sums + i) + load(sums + segment * it->panels * numbers + i));
    for (int64_t unit = start; unit < stop; unit++) {
        const real *sum = sums + unit - start;
        for (int i = 0; i < 2 && it->sources[i].to_weight != NULL; sum += it->sources[i++].features * wide) {
            const Source *source = &it->sources[i];
            for (int64_t k = 0; unit < source->units && k < source->features; k++)
                source->to_weight[unit * source->features + k] = sum[k * wide];
        }
        if (it->to_bias != NULL)
            it->to_bias[unit] = *sum;
    }
}

/* Cut the work, and take memory for it; 1 where there is none. */
static int prepare_gradients(Gradient *it)
{
    it->vectors = padded_size(it->units) / LANES;
    it->panels = (it->vectors + PANEL - 1) / PANEL;
    it->stripes = (it->panels + WIDE - 1) / WIDE;
    it->segments = MANY_UNITS / it->stripes;
    if (it->segments > it->rows / SEGMENT_ROWS)
        it->segments = it->rows / SEGMENT_ROWS;
    if (it->segments > 4)
        it->segments -= it->segments % 4; /* so that two or four threads get equal shares */
    if (it->segments < 1)
        it->segments = 1;
    it->depth = 1;
    for (int i = 0; i < 2 && it->sources[i].to_weight != NULL; i++)
        it->depth += it->sources[i].features;
    it->sums = zeros(it->segments * it->panels * it->depth * PANEL * LANES);
    return it->sums == NULL;
}

/* The gradients of ``step`` units of few rows, OUTER_UNITS or 1, straight to their places: nothing need be prepared. */
static void few_rows_step(const Gradient *it, int64_t unit, int64_t step)
{
    real scale[DIRECT_ROWS][OUTER_UNITS], sums[OUTER_UNITS] = {0};
    for (int64_t k = 0; k < it->rows; k++)
        for (int64_t i = 0; i < step; i++)
            sums[i] += scale[k][i] = it->grads[k * it->stride + unit + i];
    if (it->to_bias != NULL)
        memcpy(it->to_bias + unit, sums, step * sizeof(real));
    for (int i = 0; i < 2 && it->sources[i].to_weight != NULL; i++) {
        const Source *source = &it->sources[i];
        const int64_t features = source->features, skipped = source->first == NULL ? source->ahead : 0;
        const real *x[DIRECT_ROWS];
        for (int64_t k = skipped; k < it->rows; k++)
            x[k] = k < source->ahead ? source->first + k * features : source->x + (k - source->ahead) * features;
        real *target = source->to_weight + unit * features;
        if (unit < source->units && step == OUTER_UNITS)
            write_outer(OUTER_UNITS, target, features, scale + skipped, x + skipped, it->rows - skipped);
        else if (unit < source->units)
            write_outer(1, target, features, scale + skipped, x + skipped, it->rows - skipped);
    }
}

static void few_rows_unit(const void *context, int64_t block, real *work)
{
    const Gradient *it = context;
    const int64_t stop = (block + 1) * UNITS_AT_ONCE, end = stop < it->units ? stop : it->units;
    (void)work;
    for (int64_t unit = block * UNITS_AT_ONCE, step; unit < end; unit += step) {
        const int64_t first = it->sources[0].units, last = unit < first && first < end ? first : end;
        step = unit + OUTER_UNITS <= last ? OUTER_UNITS : 1;
        few_rows_step(it, unit, step);
    }
}

static Job few_rows_job(const Gradient *it)
{
    return (Job){few_rows_unit, it, LANES, (it->units + UNITS_AT_ONCE - 1) / UNITS_AT_ONCE, 0, 0};
}

/* The two jobs that compute prepared gradients. */
static void plan_gradients(const Gradient *it, Job jobs[2])
{
    jobs[0] = (Job){gradient_unit, it, (WIDE * PANEL * LANES + TILE_ROWS) * PIECE, it->segments * it->stripes, 0, 0};
    jobs[1] = (Job){collect_panel, it, LANES, it->panels, 0, 0};
}

#endif
