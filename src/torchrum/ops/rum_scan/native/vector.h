/* Vectors of the compiler's own kind, and what the scan computes on them.
 *
 * Rows of the workspace are padded to whole vectors with zeros, so no loop below has a tail. GCC and Clang lower these
 * types to AVX-512, AVX2, NEON or whatever the flags allow.
 */
#ifndef TORCHRUM_VECTOR_H
#define TORCHRUM_VECTOR_H

#include <stdint.h>
#include <string.h>

#ifndef VECTOR_BYTES
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#endif

#ifdef USE_DOUBLE
typedef double real;
typedef int64_t bits;
typedef uint64_t unsigned_bits;
#define MANTISSA 52
#define EXPONENT_BIAS 1023
#define ROUNDING_SHIFT 6755399441055744.0 /* 1.5 * 2^52: adding it leaves the nearest integer in the low bits */
#define LOG2_HIGH 0.693145751953125       /* few enough bits that a multiple of it is exact */
#define LOG2_LOW 1.42860682030941723212e-6
#define EXP_LIMIT 708.0
#define TANH_LIMIT 20.0
#define NO_DIRECTION 1e-30 /* as rotation.py: tiny_of, opposite_of */
#define OPPOSITE 1e-8
#define LARGE_SQUARE 1e280
#define square_root __builtin_sqrt
#else
typedef float real;
typedef int32_t bits;
typedef uint32_t unsigned_bits;
#define MANTISSA 23
#define EXPONENT_BIAS 127
#define ROUNDING_SHIFT 12582912.0f
#define LOG2_HIGH 0.693359375f
#define LOG2_LOW -2.12194440e-4f
#define EXP_LIMIT 87.0f
#define TANH_LIMIT 9.5f
#define NO_DIRECTION 1e-12f
#define OPPOSITE 1e-4f
#define LARGE_SQUARE 1e34f
#define square_root __builtin_sqrtf
#endif

#define LANES ((int64_t)(VECTOR_BYTES / sizeof(real)))
#define INLINE static inline __attribute__((always_inline))

typedef real vec __attribute__((vector_size(VECTOR_BYTES), may_alias));
typedef bits mask __attribute__((vector_size(VECTOR_BYTES), may_alias)); /* all ones where a comparison holds */
typedef real loose_vec __attribute__((vector_size(VECTOR_BYTES), may_alias, aligned(sizeof(real))));
#if VECTOR_BYTES == 64
#define HALVES 1 /* a vector of 32 bytes costs half as much as one of 64: worth it where a row ends in one */
typedef real half_vec __attribute__((vector_size(VECTOR_BYTES / 2), may_alias));
#else
#define HALVES 0
typedef vec half_vec;
#endif
typedef unsigned_bits unsigned_vec __attribute__((vector_size(VECTOR_BYTES), may_alias));

INLINE int64_t padded_size(int64_t size) { return (size + LANES - 1) / LANES * LANES; }
INLINE vec load(const real *x) { return *(const vec *)x; }
INLINE void store(real *x, vec value) { *(vec *)x = value; }
INLINE vec load_loose(const real *x) { return *(const loose_vec *)x; } /* x need not be aligned */
INLINE void store_loose(real *x, vec value) { *(loose_vec *)x = value; }
INLINE half_vec load_half(const real *x) { return *(const half_vec *)x; }
INLINE void store_half(real *x, half_vec value) { *(half_vec *)x = value; }
INLINE half_vec half_of(vec x) { return *(half_vec *)&x; }
INLINE vec splat(real x) { return x - (vec){0}; } /* 0 - x would turn -0 over */
INLINE vec choose(mask where, vec a, vec b) { return (vec)((where & (mask)a) | (~where & (mask)b)); }

INLINE real total_of(vec x)
{
#if VECTOR_BYTES >= 32
    typedef real half __attribute__((vector_size(VECTOR_BYTES / 2)));
    typedef real quarter __attribute__((vector_size(VECTOR_BYTES / 4)));
    union {
        vec whole;
        half halves[2];
    } parts = {x};
    union {
        half whole;
        quarter quarters[2];
    } smaller = {parts.halves[0] + parts.halves[1]};
    quarter rest = smaller.quarters[0] + smaller.quarters[1];
#else
    vec rest = x;
#endif
    real sum = 0;
    for (unsigned i = 0; i < sizeof rest / sizeof(real); i++)
        sum += rest[i];
    return sum;
}

/* For LANES of ``step`` and ``step`` more by turns: the first ones of a and of b, and the others of a and of b. */
INLINE void exchange(vec a, vec b, const int64_t step, vec *first, vec *second)
{
#ifdef __clang__
    for (int64_t i = 0; i < LANES; i++) {
        (*first)[i] = i & step ? b[i - step] : a[i];
        (*second)[i] = i & step ? b[i] : a[i + step];
    }
#else
    mask low, high;
    for (int64_t i = 0; i < LANES; i++) {
        low[i] = i & step ? LANES + i - step : i;
        high[i] = i & step ? LANES + i : i + step;
    }
    *first = __builtin_shuffle(a, b, low);
    *second = __builtin_shuffle(a, b, high);
#endif
}

/* Transpose LANES vectors. */
INLINE void transpose(vec *square)
{
#pragma GCC unroll 4
    for (int64_t step = 1; step < LANES; step *= 2)
#pragma GCC unroll 16
        for (int64_t i = 0; i < LANES; i++)
            if (!(i & step))
                exchange(square[i], square[i + step], step, &square[i], &square[i + step]);
}

/* Inner product of padded rows. */
INLINE real dot(const real *x, const real *y, int64_t size)
{
    vec even = {0}, odd = {0};
    int64_t j = 0;
    for (; j + 2 * LANES <= size; j += 2 * LANES) {
        even += load(x + j) * load(y + j);
        odd += load(x + j + LANES) * load(y + j + LANES);
    }
    if (j < size)
        even += load(x + j) * load(y + j);
    return total_of(even + odd);
}

/* e^x - 1 = 2^n (e^r - 1) + 2^n - 1 with |r| <= log(2)/2 and Taylor's series for e^r - 1: exact to rounding near 0 too.
 * |x| is at most EXP_LIMIT; NaN stays NaN. */
INLINE vec exp_minus_one(vec x)
{
    vec shifted = x * (real)1.4426950408889634 + (real)ROUNDING_SHIFT;
    vec n = shifted - (real)ROUNDING_SHIFT;
    vec r = x - n * (real)LOG2_HIGH - n * (real)LOG2_LOW;
    static const real coefficients[] = {1.0 / 2,     1.0 / 6,      1.0 / 24,      1.0 / 120,      1.0 / 720,       1.0 / 5040,
#ifdef USE_DOUBLE
                                        1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800,
#endif
    };
    const int terms = sizeof coefficients / sizeof *coefficients;
    vec series = splat(coefficients[terms - 1]);
#pragma GCC unroll 16
    for (int i = terms - 2; i >= 0; i--)
        series = series * r + coefficients[i];
    series = series * r + 1;
    unsigned_vec exponent = (unsigned_vec)shifted - (unsigned_vec)splat(ROUNDING_SHIFT) + EXPONENT_BIAS;
    vec power = (vec)(exponent << MANTISSA);
    return power * (series * r) + (power - 1);
}

INLINE vec clamp(vec x, real limit)
{
    x = choose(x > limit, splat(limit), x);
    return choose(x < -limit, splat(-limit), x);
}

INLINE vec sigmoid(vec x)
{
    return 1 / (exp_minus_one(clamp(-x, (real)EXP_LIMIT)) + 2);
}

INLINE vec hyperbolic_tangent(vec x)
{
    vec e = exp_minus_one(2 * clamp(x, (real)TANH_LIMIT));
    return e / (e + 2);
}

INLINE vec absolute(vec x) { return choose(x < 0, -x, x); }

#endif
