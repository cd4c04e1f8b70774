/* Gradients of a weight and a bias: sums over all rows of outer products.
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

/* to_weight (units, features) = sum_k grads[k]^T x[k] and to_bias (units,) = sum_k grads[k]; to_bias may be NULL. */
typedef struct {
    int64_t rows, features, units;
    const real *first; /* x of the first ``ahead`` rows, and of those behind them */
    int64_t ahead;
    const real *x;
    const real *grads; /* rows are ``stride`` apart */
    int64_t stride;
    real *to_weight, *to_bias;
    int64_t vectors, panels, stripes, segments;
    real *sums; /* (segments, panels, features + 1, PANEL vectors); the last row is the bias's */
} Gradient;

/* The first vector of columns of a panel. */
static int64_t first_vector(const Gradient *it, int64_t panel) { return panel * it->vectors / it->panels; }

/* Pack ``count`` rows of a panel, with zeros behind the last column, and add them to ``sum``. */
static void pack_panel(const Gradient *it, int64_t row, int64_t count, int64_t panel, real *packed, real *sum)
{
    const int64_t start = first_vector(it, panel), width = first_vector(it, panel + 1) - start;
    const int64_t column = start * LANES, left = it->units - column - (width - 1) * LANES;
    const real *source = it->grads + row * it->stride + column, *end = it->grads + it->rows * it->stride;
    mask within;
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
    const real *x;          /* the rows' x */
    real *packed, *columns; /* (to - from, PIECE, PANEL vectors), and room for columns of x */
    real *sums;             /* the segment's */
} Piece;

/* The part of ROWS columns of x, a constant, from the i-th one. While it computes it asks for the next columns of x and
 * for rows of the next piece. */
INLINE void add_columns(const int ROWS, const Gradient *it, const Piece *piece, int64_t i)
{
    const int64_t features = it->features, wide = PANEL * LANES, panels = piece->to - piece->from;
    const real *next = it->grads + (piece->row + piece->count) * it->stride + first_vector(it, piece->from) * LANES;
    for (int64_t k = 0; k < piece->count; k++)
        memcpy(piece->columns + k * ROWS, piece->x + k * features + i, ROWS * sizeof(real));
    for (int64_t p = piece->from; p < piece->to; p++) {
        const int64_t at = p - piece->from, width = first_vector(it, p + 1) - first_vector(it, p);
        const Lines columns = {(const char *)(piece->x + i + ROWS), features * (int64_t)sizeof(real)};
        const Lines rows = {(const char *)next + (i / TILE_ROWS * panels + at) * LINE, it->stride * (int64_t)sizeof(real)};
        tile_of_width(ROWS, width, piece->columns, 1, ROWS, piece->packed + at * PIECE * wide, piece->count,
                      piece->sums + (p * (features + 1) + i) * wide, wide, columns, rows);
    }
}

/* One stripe of one segment. */
static void gradient_unit(const void *context, int64_t unit, real *work)
{
    const Gradient *it = context;
    const int64_t features = it->features, stripe = unit % it->stripes, segment = unit / it->stripes, wide = PANEL * LANES;
    const int64_t end = (segment + 1) * it->rows / it->segments;
    Piece piece = {.row = segment * it->rows / it->segments, .from = stripe * it->panels / it->stripes,
                   .to = (stripe + 1) * it->panels / it->stripes, .packed = work, .columns = work + WIDE * PIECE * wide,
                   .sums = it->sums + segment * it->panels * (features + 1) * wide};
    for (; piece.row < end; piece.row += piece.count) {
        const int behind = piece.row >= it->ahead;
        const int64_t stop = !behind && it->ahead < end ? it->ahead : end;
        piece.x = behind ? it->x + (piece.row - it->ahead) * features : it->first + piece.row * features;
        piece.count = stop - piece.row < PIECE ? stop - piece.row : PIECE;
        for (int64_t p = piece.from; p < piece.to; p++)
            pack_panel(it, piece.row, piece.count, p, work + (p - piece.from) * PIECE * wide,
                       piece.sums + (p * (features + 1) + features) * wide);
#define ADD(ROWS, i) add_columns(ROWS, it, &piece, i)
        WITH_TILES(features, ADD);
#undef ADD
    }
}

/* Add up the segments, transposed. */
static void collect(const Gradient *it)
{
    const int64_t features = it->features, wide = PANEL * LANES, panel = (features + 1) * wide;
    for (int64_t p = 0; p < it->panels; p++) {
        const int64_t start = first_vector(it, p) * LANES, end = first_vector(it, p + 1) * LANES;
        for (int64_t unit = start; unit < end && unit < it->units; unit++)
            for (int64_t i = 0; i <= features; i++) {
                real total = 0;
                for (int64_t segment = 0; segment < it->segments; segment++)
                    total += it->sums[(segment * it->panels + p) * panel + i * wide + unit - start];
                if (i < features)
                    it->to_weight[unit * features + i] = total;
                else if (it->to_bias != NULL)
                    it->to_bias[unit] = total;
            }
    }
}

/* Compute a gradient; 1 where memory ran out. */
static int find_gradient(Gradient it, int64_t threads)
{
    it.vectors = padded_size(it.units) / LANES;
    it.panels = (it.vectors + PANEL - 1) / PANEL;
    it.stripes = (it.panels + WIDE - 1) / WIDE;
    it.segments = MANY_UNITS / it.stripes;
    if (it.segments > it.rows / SEGMENT_ROWS)
        it.segments = it.rows / SEGMENT_ROWS;
    if (it.segments < 1)
        it.segments = 1;
    it.sums = zeros(it.segments * it.panels * (it.features + 1) * PANEL * LANES);
    if (it.sums == NULL)
        return 1;
    Job job = {gradient_unit, &it, (WIDE * PANEL * LANES + TILE_ROWS) * PIECE, it.segments * it.stripes, 0, 0};
    int failed = run_threads(&job, threads);
    if (!failed)
        collect(&it);
    free(it.sums);
    return failed;
}

#endif
