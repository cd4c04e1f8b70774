// What the two kernels share of a step's arithmetic: the rotation, the activation, zoneout's mask.

// The rotation's row scalars; eps and tau enter as eps * inv_eps and tau * inv_tau.
struct Rotation {
    float inv_eps, inv_tau, c, p, q, k, coef_eps, coef_tau;
    bool opposite, narrow;
};
#if WIDE
// The sum s = e + w of the two unit vectors: its square and its inner product with h.
struct Bisector {
    float square, along;
};
// From the row sums; where the square is below NARROW it has lost digits.
DEVICE Bisector bisector_of(float ee, float tt, float et, float th, float eh) {
    if (ee <= TINY || tt <= TINY) return {2.f, 0.f};
    const float inv_eps = inverse_root(ee), inv_tau = inverse_root(tt);
    return {2.f + 2.f * et * inv_eps * inv_tau, eh * inv_eps + th * inv_tau};
}
DEVICE Rotation rotation_of(float ee, float tt, float square, float along, float eh) {
    Rotation r;
    bool rotates = !(ee <= TINY || tt <= TINY);  // NaN rotates: it must stay NaN
    r.inv_eps = rotates ? inverse_root(ee) : 0.f;
    r.inv_tau = rotates ? inverse_root(tt) : 0.f;
    r.c = 0.5f * square - 1.f;
    r.p = eh * r.inv_eps;
    r.q = along - r.p;
    r.opposite = rotates && square <= OPPOSITE;
    r.narrow = rotates && !r.opposite && square < NARROW;
    r.k = rotates && !r.opposite ? 2.f / square : 0.f;
    r.coef_eps = r.opposite ? -2.f * r.p : -r.k * along;
    r.coef_tau = r.opposite ? 0.f : 2.f * r.p + r.coef_eps;
    return r;
}
// The second vector that the gradient's row sums go along: tau, or s where the sums along eps and tau would cancel.
DEVICE float second_of(const Rotation& r, float eps, float tau) { return r.narrow ? eps * r.inv_eps + tau * r.inv_tau : tau; }
#else
DEVICE Rotation rotation_of(float ee, float tt, float et, float th, float eh) {
    Rotation r;
    bool rotates = !(ee <= TINY || tt <= TINY);  // NaN rotates: it must stay NaN
    r.inv_eps = rotates ? inverse_root(ee) : 0.f;
    r.inv_tau = rotates ? inverse_root(tt) : 0.f;
    r.c = et * r.inv_eps * r.inv_tau;
    r.p = eh * r.inv_eps;
    r.q = th * r.inv_tau;
    r.opposite = rotates && 1.f + r.c <= OPPOSITE;
    r.k = rotates && !r.opposite ? 1.f / (1.f + r.c) : 0.f;
    r.coef_eps = r.opposite ? -2.f * r.p : -r.k * (r.p + r.q);
    r.coef_tau = r.opposite ? 0.f : 2.f * r.p + r.coef_eps;
    return r;
}
#define second_of(rotation, eps, tau) (tau)
#endif
// Opposite vectors: the half turn's second mirror is f = (axis i - e_i e) / norm, i the unit where |eps| is smallest.
struct HalfTurn {
    int unit;
    float e_i, inv_norm, along;  // eps_i / |eps|, 1 / norm (0 without such a mirror), f . h
};
// One number of an eps that may not have its bias yet.
DEVICE float eps_at(const Element* eps, const Element* bias, int j) {
    return bias ? to_float(eps[j]) + to_float(bias[j]) : to_float(eps[j]);
}
RARE HalfTurn half_turn_of(const Element* eps, const Element* bias, int N, float inv_eps) {
    HalfTurn f;
    float least = 3e38f;
    f.unit = 0;
    for (int j = 0; j < N; j++) {
        float x = eps_at(eps, bias, j);
        x = x < 0.f ? -x : x;
        if (x < least) least = x, f.unit = j;
    }
    f.e_i = eps_at(eps, bias, f.unit) * inv_eps;
    float square = 1.f - f.e_i * f.e_i;
    f.inv_norm = square > 1e-12f ? inverse_root(square) : 0.f;
    f.along = 0.f;
    return f;
}
DEVICE float rotated_h(const Rotation& r, const HalfTurn& f, int unit, float eps, float tau, float h) {
    float y = h + r.coef_eps * r.inv_eps * eps + r.coef_tau * r.inv_tau * tau;
    if (r.opposite) y -= 2.f * f.along * f.inv_norm * ((unit == f.unit ? 1.f : 0.f) - f.e_i * r.inv_eps * eps);
    return y;
}

DEVICE float sigmoid(float x) { return 1.f / (1.f + fast_exp(-x)); }
#if ACTIVATION == 0  // relu
DEVICE float activate(float x) { return x < 0.f ? 0.f : x; }
DEVICE float slope(float x, float y) { return x > 0.f ? 1.f : 0.f; }
#elif ACTIVATION == 1  // tanh
#if WIDE
DEVICE float activate(float x) {
    const float size = x < 0.f ? -x : x, decay = fast_exp(-2.f * size), large = (1.f - decay) / (1.f + decay), xx = x * x;
    const float small = x * (1.f + xx * (-1.f / 3.f + xx * (2.f / 15.f)));  // the difference cancels near zero
    return size < 0.1f ? small : x < 0.f ? -large : large;
}
#else
DEVICE float activate(float x) { return 2.f * sigmoid(2.f * x) - 1.f; }
#endif
DEVICE float slope(float x, float y) { return 1.f - y * y; }
#elif ACTIVATION == 2  // sigmoid
DEVICE float activate(float x) { return sigmoid(x); }
DEVICE float slope(float x, float y) { return y * (1.f - y); }
#else  // softsign
DEVICE float activate(float x) { return x / (1.f + (x < 0.f ? -x : x)); }
DEVICE float slope(float x, float y) {
    float d = 1.f + (x < 0.f ? -x : x);
    return 1.f / (d * d);
}
#endif

DEVICE u32 hash32(u32 x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ x >> 16;
}
// Zoneout's weight of the new value.
DEVICE float share_of_new(u32 key, u32 index, u32 keep_below, float zoneout) {
#if ZONEOUT == 2
    return hash32(key ^ index) < keep_below ? 1.f : 0.f;
#elif ZONEOUT == 1
    return 1.f - zoneout;
#else
    return 1.f;
#endif
}
