/* Matmuls: panels of packed columns, a tile of accumulators in registers. */
#ifndef TORCHRUM_MATMUL_H
#define TORCHRUM_MATMUL_H

#include "vector.h"

/* A tile has TILE_ROWS rows and PANEL vectors of columns; its accumulators and one row of the panel fill the registers. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define TILE_ROWS 8
#else
#define TILE_ROWS 4
#endif
#define PANEL 3

#define DIRECT_ROWS 32 /* rows times steps up to which a matmul does not pack its weight */
#define FEW_ROWS 4     /* up to which it takes the rows one by one */
#define OUTER_UNITS 4  /* rows of the gradient of a weight that are found at a time, where there are so few */

/* Whether a recurrent weight is read as it is. Over several steps packing it pays sooner. */
INLINE int reads_directly(int64_t T, int64_t B) { return T * B <= (T == 1 ? DIRECT_ROWS : FEW_ROWS); }

/* Memory that will soon be read or written. A matmul asks for it line by line while it computes; all at once would make
 * the core wait. */
typedef struct {
    struct {
        const char *next;
        int64_t lines;
    } parts[6];
    int count;
} Prefetch;

#define LINE 64

INLINE void add_prefetch(Prefetch *prefetch, const real *x, int64_t numbers)
{
    prefetch->parts[prefetch->count].next = (const char *)x;
    prefetch->parts[prefetch->count++].lines = (numbers * (int64_t)sizeof(real) + LINE - 1) / LINE;
}

/* Lines to ask for one by one, so many bytes apart. */
typedef struct {
    const char *start;
    int64_t step;
} Lines;

/* The next ``lines`` lines to ask for; ``nothing``, which is in the cache, if there are none. */
INLINE Lines next_lines(Prefetch *prefetch, int64_t lines, const real *nothing)
{
    if (prefetch == NULL || prefetch->count == 0)
        return (Lines){(const char *)nothing, 0};
    const char *start = prefetch->parts[prefetch->count - 1].next;
    prefetch->parts[prefetch->count - 1].next += lines * LINE;
    prefetch->parts[prefetch->count - 1].lines -= lines;
    if (prefetch->parts[prefetch->count - 1].lines <= 0)
        prefetch->count--;
    return (Lines){start, LINE};
}

INLINE int64_t count_lines(const Prefetch *prefetch)
{
    int64_t lines = 0;
    for (int i = 0; prefetch != NULL && i < prefetch->count; i++)
        lines += prefetch->parts[i].lines;
    return lines;
}

/* c (ROWS, WIDTH vectors) += a (ROWS, K) w (K, WIDTH vectors), for constants ROWS and WIDTH; asks for K lines of
 * each of soon and later. Rows of a are a_stride apart, its columns a_step. The sum starts at 0 and meets c at the end:
 * c may be a sum of many such pieces, which loses fewer digits than one long sum. */
INLINE void tile(const int ROWS, const int WIDTH, const real *a, int64_t a_stride, int64_t a_step, const real *w, int64_t K,
                 real *c, int64_t c_stride, Lines soon, Lines later)
{
    vec sum[TILE_ROWS][PANEL];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < WIDTH; j++)
            sum[i][j] = (vec){0};
    for (int64_t k = 0; k < K; k++) {
        vec column[PANEL];
        __builtin_prefetch(soon.start + k * soon.step, 0, 3);
        __builtin_prefetch(later.start + k * later.step, 0, 3);
#pragma GCC unroll 4
        for (int j = 0; j < WIDTH; j++)
            column[j] = load(w + (k * WIDTH + j) * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++) {
            vec value = splat(a[i * a_stride + k * a_step]);
#pragma GCC unroll 4
            for (int j = 0; j < WIDTH; j++)
                sum[i][j] += value * column[j];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
        for (int j = 0; j < WIDTH; j++)
            store(c + i * c_stride + j * LANES, load(c + i * c_stride + j * LANES) + sum[i][j]);
}

INLINE void tile_of_width(const int ROWS, int64_t width, const real *a, int64_t a_stride, int64_t a_step, const real *w,
                          int64_t K, real *c, int64_t c_stride, Lines soon, Lines later)
{
    if (width == 3)
        tile(ROWS, 3, a, a_stride, a_step, w, K, c, c_stride, soon, later);
    else if (width == 2)
        tile(ROWS, 2, a, a_stride, a_step, w, K, c, c_stride, soon, later);
    else
        tile(ROWS, 1, a, a_stride, a_step, w, K, c, c_stride, soon, later);
}

/* CALL(ROWS, i) for tiles of a constant number of ROWS that cover ``rows``; i is the first one's. */
#define WITH_TILES(rows, CALL)                                                                                         \
    do {                                                                                                               \
        int64_t tile_at = 0;                                                                                           \
        for (; tile_at + TILE_ROWS <= (rows); tile_at += TILE_ROWS)                                                    \
            CALL(TILE_ROWS, tile_at);                                                                                  \
        for (; tile_at + 4 <= (rows); tile_at += 4)                                                                    \
            CALL(4, tile_at);                                                                                          \
        for (; tile_at + 2 <= (rows); tile_at += 2)                                                                    \
            CALL(2, tile_at);                                                                                          \
        for (; tile_at < (rows); tile_at++)                                                                            \
            CALL(1, tile_at);                                                                                          \
    } while (0)

/* A matrix (K, columns) as panels, each of up to PANEL vectors of columns. */
typedef struct {
    int64_t K, vectors, panels;
    real *data;
} Packed;

static Packed packed_shape(int64_t K, int64_t columns)
{
    int64_t vectors = columns / LANES;
    return (Packed){K, vectors, (vectors + PANEL - 1) / PANEL, NULL};
}

static int64_t panel_start(const Packed *w, int64_t panel) { return panel * w->vectors / w->panels; }

/* c (rows, vectors) += a (rows, K) w; prefetch may be NULL. */
static void matmul(const real *a, int64_t a_stride, const Packed *w, real *c, int64_t c_stride, int64_t rows, Prefetch *prefetch)
{
    Prefetch *rest = count_lines(prefetch) > w->panels * (rows / TILE_ROWS) * w->K ? prefetch : NULL; /* two at a time only then */
    for (int64_t panel = 0; panel < w->panels; panel++) {
        int64_t start = panel_start(w, panel), width = panel_start(w, panel + 1) - start;
        const real *columns = w->data + start * w->K * LANES;
#define MULTIPLY(ROWS, i)                                                                                              \
    tile_of_width(ROWS, width, a + (i) * a_stride, a_stride, 1, columns, w->K, c + (i) * c_stride + start * LANES,     \
                  c_stride, next_lines(prefetch, w->K, columns), next_lines(rest, w->K, columns))
        WITH_TILES(rows, MULTIPLY);
#undef MULTIPLY
    }
}

/* y[j] += the inner product of row j of w (rows, K) with v: for a single row, w is read as it is. */
static void add_dots(const real *w, int64_t rows, int64_t K, const real *v, real *y)
{
    const int64_t whole = K - K % LANES;
    for (int64_t j = 0; j < rows; j += 4) {
        const int64_t count = rows - j < 4 ? rows - j : 4;
        const real *row[4]; /* the last one stands in for those that are not there */
        vec sum[4] = {{0}};
        for (int64_t i = 0; i < 4; i++)
            row[i] = w + (j + (i < count ? i : count - 1)) * K;
        for (int64_t k = 0; k < whole; k += LANES) {
            vec value = load_loose(v + k);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                sum[i] += load_loose(row[i] + k) * value;
        }
        for (int64_t i = 0; i < count; i++) {
            real total = total_of(sum[i]);
            for (int64_t k = whole; k < K; k++)
                total += row[i][k] * v[k];
            y[j + i] += total;
        }
    }
}

/* Pack weight (groups * units, K), rows ``stride`` apart, so that rows (rows, K) times it give groups of `padded`
 * columns, `units` of them used. */
static void pack_transposed(Packed *w, const real *weight, int64_t stride, int64_t units, int64_t padded)
{
    const int64_t K = w->K;
    for (int64_t panel = 0; panel < w->panels; panel++) {
        const int64_t start = panel_start(w, panel), width = panel_start(w, panel + 1) - start;
        for (int64_t j = 0; j < width; j++) {
            const int64_t group = (start + j) * LANES / padded, unit = (start + j) * LANES % padded;
            const int64_t rows = units - unit < LANES ? units - unit : LANES;
            const real *source = weight + (group * units + unit) * stride;
            for (int64_t k = 0; k < K; k += LANES) {
                const int64_t columns = K - k < LANES ? K - k : LANES;
                real *target = w->data + (start * K + k * width + j) * LANES;
                vec square[LANES] = {{0}};
                for (int64_t i = 0; i < rows; i++)
                    if (columns == LANES)
                        square[i] = load_loose(source + i * stride + k);
                    else
                        memcpy(&square[i], source + i * stride + k, columns * sizeof(real));
                transpose(square);
                for (int64_t i = 0; i < columns; i++)
                    store(target + i * width * LANES, square[i]);
            }
        }
    }
}

/* A few rows v (count, K), ``stride`` apart, as ``add_products`` takes them; ``memory`` is of ``columns_size``. */
typedef struct {
    const real *v;
    int64_t stride, count;
    Packed columns; /* of more than FEW_ROWS rows: v transposed, so that each lane has a row */
} Rows;

static int64_t columns_size(int64_t count, int64_t K) { return count > FEW_ROWS ? K * padded_size(count) : 0; }

static Rows pack_rows(const real *v, int64_t stride, int64_t count, int64_t K, real *memory)
{
    Rows rows = {v, stride, count, packed_shape(K, padded_size(count))};
    rows.columns.data = memory;
    if (count > FEW_ROWS)
        pack_transposed(&rows.columns, v, stride, count, padded_size(count));
    return rows;
}

/* y (count, units) += v (count, K) w^T, where w (units, K) is read as it is: for at most DIRECT_ROWS rows. */
static void add_products(const real *w, int64_t units, const Rows *v, real *y, int64_t y_stride)
{
    const int64_t K = v->columns.K, padded = padded_size(v->count);
    for (int64_t i = 0; v->count <= FEW_ROWS && i < v->count; i++)
        add_dots(w, units, K, v->v + i * v->stride, y + i * y_stride);
    for (int64_t j = 0; v->count > FEW_ROWS && j < units; j += LANES) {
        real sums[LANES * (DIRECT_ROWS + LANES)] __attribute__((aligned(VECTOR_BYTES)));
        const int64_t width = units - j < LANES ? units - j : LANES;
        memset(sums, 0, LANES * padded * sizeof(real));
        matmul(w + j * K, K, &v->columns, sums, padded, width, NULL);
        for (int64_t i = 0; i < v->count; i += LANES) {
            vec square[LANES];
            for (int64_t n = 0; n < LANES; n++)
                square[n] = load(sums + n * padded + i);
            transpose(square);
            for (int64_t n = 0; n < LANES && i + n < v->count; n++) {
                real *target = y + (i + n) * y_stride + j;
                if (width == LANES)
                    store_loose(target, load_loose(target) + square[n]);
                for (int64_t m = 0; width < LANES && m < width; m++)
                    target[m] += square[n][m];
            }
        }
    }
}

/* y (rows, columns) += a (rows, K) w, where w (K, columns) is read as it is: for few rows. */
static void add_rows(const real *w, int64_t K, int64_t columns, const real *a, int64_t a_stride, int64_t rows, real *y,
                     int64_t y_stride)
{
    enum { DEPTH = 8 };
    const int64_t whole = columns - columns % LANES;
    for (int64_t k = 0; k < K; k += DEPTH) {
        const int64_t count = K - k < DEPTH ? K - k : DEPTH;
        for (int64_t i = 0; i < rows; i++) {
            const real *row[DEPTH];
            real *target = y + i * y_stride, scale[DEPTH];
            for (int64_t d = 0; d < DEPTH; d++) {
                row[d] = w + (k + (d < count ? d : 0)) * columns;
                scale[d] = d < count ? a[i * a_stride + k + d] : 0;
            }
            for (int64_t j = 0; j < whole; j += LANES) {
                vec sum = load_loose(target + j);
#pragma GCC unroll 8
                for (int d = 0; d < DEPTH; d++)
                    sum += load_loose(row[d] + j) * scale[d];
                store_loose(target + j, sum);
            }
            for (int64_t j = whole; j < columns; j++)
                for (int64_t d = 0; d < count; d++)
                    target[j] += row[d][j] * scale[d];
        }
    }
}

/* y (UNITS, columns) = sum_k scale[k] x[k], of constant UNITS, for few k. */
INLINE void write_outer(const int UNITS, real *y, int64_t columns, const real (*scale)[OUTER_UNITS], const real *const *x, int64_t count)
{
    const int64_t whole = columns - columns % LANES;
    for (int64_t j = 0; j < whole; j += LANES) {
        vec sum[OUTER_UNITS] = {{0}};
        for (int64_t k = 0; k < count; k++) {
            const vec value = load_loose(x[k] + j);
#pragma GCC unroll 4
            for (int i = 0; i < UNITS; i++)
                sum[i] += value * scale[k][i];
        }
#pragma GCC unroll 4
        for (int i = 0; i < UNITS; i++)
            store_loose(y + i * columns + j, sum[i]);
    }
    for (int64_t i = 0; i < UNITS; i++)
        for (int64_t j = whole; j < columns; j++) {
            y[i * columns + j] = 0;
            for (int64_t k = 0; k < count; k++)
                y[i * columns + j] += x[k][j] * scale[k][i];
        }
}

/* Pack a matrix (K, columns) as it is, with zeros behind its columns. */
static void pack_straight(Packed *w, const real *matrix, int64_t columns)
{
    for (int64_t k = 0; k < w->K; k++, matrix += columns)
        for (int64_t panel = 0; panel < w->panels; panel++) {
            int64_t start = panel_start(w, panel) * LANES, width = panel_start(w, panel + 1) * LANES - start;
            real *target = w->data + start * w->K + k * width;
            for (int64_t j = 0; j < width; j += LANES)
                if (start + j + LANES <= columns) {
                    store(target + j, load_loose(matrix + start + j));
                } else {
                    store(target + j, (vec){0});
                    memcpy(target + j, matrix + start + j, (columns - start - j) * sizeof(real));
                }
        }
}

#endif
