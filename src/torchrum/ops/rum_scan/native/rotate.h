/* The rotation of lam = 0: R(eps, tau) h as a combination of h, eps and tau, and its gradients; as ../torch_rotation.py. */
#ifndef TORCHRUM_ROTATE_H
#define TORCHRUM_ROTATE_H

#include "step.h"

#define NARROW (real)0.02 /* s.s below which 2 + 2 e.w has lost too many digits */

typedef struct {
    real p, k, inv_eps, inv_tau, inv_square;
    int opposite;
} Angle;

/* f = a fixed unit vector orthogonal to the unit vector e: the axis where e is smallest, made orthogonal to e. */
static void orthogonal_to(const real *e, real *f, int64_t H, int64_t padded)
{
    int64_t smallest = 0;
    for (int64_t j = 1; j < H; j++)
        if (__builtin_fabs(e[j]) < __builtin_fabs(e[smallest]))
            smallest = j;
    for (int64_t j = 0; j < padded; j++)
        f[j] = -e[smallest] * e[j];
    f[smallest] += 1;
    real inverse = inverse_of(square_root(dot(f, f, padded)));
    for (int64_t j = 0; j < padded; j++)
        f[j] *= inverse;
}

/* The angle from the unit vectors themselves: for those that are nearly opposite, missing, or very long. */
static Angle find_rare_angle(const Shared *shared, const Row *row, const real *h, real inv_eps, real inv_tau)
{
    const int64_t padded = shared->padded;
    real *s = row->scratch, *e = s + padded;
    for (int64_t j = 0; j < padded; j++) {
        e[j] = row->eps[j] * inv_eps;
        s[j] = e[j] + row->tau[j] * inv_tau;
    }
    real square = dot(s, s, padded);
    int fixed = inv_eps == 0 || inv_tau == 0; /* nothing turns; not so for NaN */
    Angle angle = {dot(e, h, padded), 0, inv_eps, inv_tau, 0, !fixed && square <= (real)OPPOSITE * (real)OPPOSITE};
    angle.inv_tau = angle.opposite ? 0 : inv_tau;
    angle.inv_square = fixed || angle.opposite ? 0 : 1 / square;
    angle.k = dot(s, h, padded) * angle.inv_square;
    return angle;
}

static Angle find_angle(const Shared *shared, const Row *row, const real *h)
{
    vec eps_eps = {0}, tau_tau = {0}, eps_tau = {0}, eps_h = {0}, tau_h = {0};
    for (int64_t j = 0; j < shared->padded; j += LANES) {
        vec eps = load(row->eps + j), tau = load(row->tau + j), state = load(h + j);
        eps_eps += eps * eps;
        tau_tau += tau * tau;
        eps_tau += eps * tau;
        eps_h += eps * state;
        tau_h += tau * state;
    }
    real eps_square = total_of(eps_eps), tau_square = total_of(tau_tau);
    real inv_eps = inverse_of(length_of(row->eps, eps_square, shared->padded));
    real inv_tau = inverse_of(length_of(row->tau, tau_square, shared->padded));
    if (shared->scan->H == 1)
        inv_eps = 0; /* the only rotation of a line is 1 */
    real square = 2 + 2 * total_of(eps_tau) * inv_eps * inv_tau;
    int usual = square >= NARROW && inv_eps > 0 && inv_tau > 0 && eps_square < LARGE_SQUARE && tau_square < LARGE_SQUARE;
    if (!usual)
        return find_rare_angle(shared, row, h, inv_eps, inv_tau);
    real p = total_of(eps_h) * inv_eps;
    return (Angle){p, (p + total_of(tau_h) * inv_tau) / square, inv_eps, inv_tau, 1 / square, 0};
}

/* total = eps + R h */
static void rotate(const Shared *shared, Angle angle, const Row *row, const real *h)
{
    const int64_t padded = shared->padded;
    const real by_eps = 1 - 2 * angle.k * angle.inv_eps, by_tau = 2 * (angle.p - angle.k) * angle.inv_tau;
    for (int64_t j = 0; j < padded; j += LANES)
        store(row->total + j, load(h + j) + by_eps * load(row->eps + j) + by_tau * load(row->tau + j));
    if (!angle.opposite)
        return;
    real *e = row->scratch, *f = e + padded;
    for (int64_t j = 0; j < padded; j++)
        e[j] = row->eps[j] * angle.inv_eps;
    orthogonal_to(e, f, shared->scan->H, padded);
    real along = dot(f, h, padded);
    for (int64_t j = 0; j < padded; j++)
        row->total[j] -= 2 * (angle.p * e[j] + along * f[j]);
}

/* Gradients of a half turn, where f is a constant: to_h and to_eps hold what the other formulas gave. */
static void half_turn_backward(const Shared *shared, Angle angle, const Row *row, const real *h, real *to_h)
{
    const int64_t padded = shared->padded;
    const real *grad = row->to_candidate;
    real *e = row->scratch, *f = e + padded;
    for (int64_t j = 0; j < padded; j++)
        e[j] = row->eps[j] * angle.inv_eps;
    orthogonal_to(e, f, shared->scan->H, padded);
    real grad_e = dot(grad, e, padded), grad_f = dot(grad, f, padded);
    for (int64_t j = 0; j < padded; j++) {
        real reversed = grad_e * e[j] + grad_f * f[j];
        to_h[j] -= 2 * reversed;
        real change = grad_e * h[j] + angle.p * grad[j] - 2 * angle.p * reversed;
        row->to_eps[j] -= 2 * angle.inv_eps * change;
    }
}

/* Gradients of ``rotate`` from that of the total, in ``row->to_candidate``. */
static void rotate_backward(const Shared *shared, Angle angle, const Row *row, const real *h, real *to_h)
{
    const int64_t padded = shared->padded;
    const real *grad = row->to_candidate;
    vec along_eps = {0}, along_tau = {0};
    for (int64_t j = 0; j < padded; j += LANES) {
        along_eps += load(grad + j) * load(row->eps + j);
        along_tau += load(grad + j) * load(row->tau + j);
    }
    const real p = angle.p, k = angle.k, inv_eps = angle.inv_eps, inv_tau = angle.inv_tau;
    const real d_e = total_of(along_eps) * inv_eps, d_w = total_of(along_tau) * inv_tau;
    const real sigma = angle.inv_square * (d_e + d_w), rest = d_w - sigma, cross = 4 * k * sigma;
    const real tau_w = 2 * ((2 * k - p) * sigma - (p - k) * d_w), eps_e = cross - 2 * p * rest - 2 * k * d_w;
    for (int64_t j = 0; j < padded; j += LANES) {
        /* of directions, not of eps and tau: 1/|tau| squared over s.s would overflow where tau is short */
        vec d = load(grad + j), e = load(row->eps + j) * inv_eps, w = load(row->tau + j) * inv_tau, state = load(h + j);
        store(row->to_tau + j, (2 * (p - k) * d - 2 * sigma * state + cross * e + tau_w * w) * inv_tau);
        store(row->to_eps + j, d + (2 * rest * state - 2 * k * d + eps_e * e + cross * w) * inv_eps);
        store(to_h + j, d + 2 * rest * e - 2 * sigma * w);
    }
    if (angle.opposite)
        half_turn_backward(shared, angle, row, h, to_h);
}

#endif
