// Row-wise part of one RUM step, forward and backward. The matmul with h stays in torch.
// Rotation of a head: z = hr + 2 p w - 2 k s, with e = eps/|eps|, w = tau/|tau|, s = e + w, p = e.hr, k = s.hr / s.s.
#include <math.h>
#include <string.h>
#ifndef REAL
#define REAL float
#endif
#define RESET 1
#define MIX 2      /* tau joins the candidate with a gain */
#define AFTER 4    /* reset gate after the rotation: r * (R h) */
#define MIXIN 8    /* with MIX and AFTER: the reset gate acts on tau's share too, r * (gt tau + R h), as in nn.GRU */
#define MAXH 1024
typedef REAL real;

static inline real fexp(real x) {
#ifdef DOUBLE
  return exp(x);
#else
  x = x < -80.f ? -80.f : (x > 80.f ? 80.f : x);
  float t = x * 1.44269504088896341f, r = floorf(t + 0.5f), f = (t - r) * 0.693147180559945f;
  float p = 1.f + f * (1.f + f * (0.5f + f * (0.16666667f + f * (0.041666668f + f * (0.008333334f + f * 0.0013888889f)))));
  union { int i; float f; } b;
  b.i = ((int)r + 127) << 23;
  return p * b.f;
#endif
}
static inline real sigm(real x) { return 1 / (1 + fexp(-x)); }
static inline real act(real x, int f) {
  if (f == 0) { real y = x > 15 ? 15 : (x < -15 ? -15 : x); return 1 - 2 / (fexp(2 * y) + 1); }
  if (f == 1) return x > 0 ? x : 0;
  return x / (1 + (x < 0 ? -x : x));
}
static inline real slope(real c, int f) {
  if (f == 0) return 1 - c * c;
  if (f == 1) return c > 0;
  real a = 1 - (c < 0 ? -c : c);
  return a * a;
}
static inline real dot(const real *a, const real *b, int n) {
  real s = 0;
  for (int i = 0; i < n; i++) s += a[i] * b[i];
  return s;
}
// unit vectors and s.s; returns 0 where the rotation is the identity (a zero vector, or opposite vectors)
static int frame(const real *eps, const real *tau, int n, real *e, real *w, real *ie, real *it, real *ss) {
  real ne = dot(eps, eps, n), nt = dot(tau, tau, n);
  if (!(ne > 1e-24) || !(nt > 1e-24)) return 0;
  *ie = 1 / sqrt(ne); *it = 1 / sqrt(nt);
  real sum = 0;
  for (int i = 0; i < n; i++) { e[i] = eps[i] * *ie; w[i] = tau[i] * *it; real s = e[i] + w[i]; sum += s * s; }
  *ss = sum;
  return sum > 1e-6;
}

// xp (B, (G+1)H): tau, u[, r], eps. pre (B, G H): h U^T. save (B, 4H): tau, u, r, c. R (B, heads, n, n) or NULL.
void step_fwd(int B, int H, int n, int flags, int f, real eta, real res, const real *kap, const real *xp, const real *pre, const real *h, const real *g,
              const real *gt, real *out, real *save, const real *R_in, real *R_out, real *norm) {
  int G = flags & RESET ? 3 : 2, heads = (H + n - 1) / n;
  real hr[MAXH], z[MAXH], e[MAXH], w[MAXH], y[MAXH], rt[MAXH];
  for (int b = 0; b < B; b++) {
    const real *x = xp + (long)b * (G + 1) * H, *q = pre + (long)b * G * H, *hb = h + (long)b * H, *eps = x + G * H;
    real *tau = save + (long)b * 4 * H, *u = tau + H, *r = u + H, *c = r + H, *o = out + (long)b * H;
    for (int i = 0; i < H; i++) { tau[i] = x[i] + q[i]; u[i] = sigm(x[H + i] + q[H + i]); }
    if (flags & RESET) for (int i = 0; i < H; i++) r[i] = sigm(x[2 * H + i] + q[2 * H + i]);
    if ((flags & RESET) && !(flags & AFTER)) for (int i = 0; i < H; i++) hr[i] = r[i] * hb[i];
    else memcpy(hr, hb, H * sizeof(real));
    for (int k = 0; k < heads; k++) {
      int a = k * n, m = H - a < n ? H - a : n;
      real ie, it, ss;
      for (int i = a; i < a + m; i++) rt[i] = tau[i] + res * eps[i];
      int ok = frame(eps + a, rt + a, m, e, w, &ie, &it, &ss);
      if (R_in) {
        const real *Ri = R_in + ((long)b * heads + k) * n * n; real *Ro = R_out + ((long)b * heads + k) * n * n;
        real is = ok ? 1 / sqrt(ss) : 0;
        for (int i = 0; i < m; i++) {
          const real *row = Ri + i * n; real *to = Ro + i * n; real s1 = 0, s2 = 0;
          if (!ok) { memcpy(to, row, m * sizeof(real)); z[a + i] = dot(to, hr + a, m); continue; }
          for (int j = 0; j < m; j++) s1 += row[j] * (e[j] + w[j]);
          s1 *= 2 * is * is;
          for (int j = 0; j < m; j++) { to[j] = row[j] - s1 * (e[j] + w[j]); }
          for (int j = 0; j < m; j++) s2 += to[j] * e[j];
          real acc = 0;
          for (int j = 0; j < m; j++) { to[j] -= 2 * s2 * e[j]; acc += to[j] * hr[a + j]; }
          z[a + i] = acc;
        }
      } else if (ok) {
        real p = dot(e, hr + a, m), kk = (p + dot(w, hr + a, m)) / ss;
        for (int i = 0; i < m; i++) z[a + i] = hr[a + i] + 2 * p * w[i] - 2 * kk * (e[i] + w[i]);
      } else memcpy(z + a, hr + a, m * sizeof(real));
    }
    for (int i = 0; i < H; i++) z[i] *= kap[i];
    if (flags & MIXIN) for (int i = 0; i < H; i++) z[i] += gt[i] * tau[i];
    if ((flags & RESET) && (flags & AFTER)) for (int i = 0; i < H; i++) z[i] *= r[i];
    if ((flags & MIX) && !(flags & MIXIN)) for (int i = 0; i < H; i++) z[i] += gt[i] * tau[i];
    for (int i = 0; i < H; i++) { c[i] = act(g[i] * eps[i] + z[i], f); y[i] = c[i] + u[i] * (hb[i] - c[i]); }
    if (eta > 0) {
      real len = sqrt(dot(y, y, H)), k = len > 1e-12 ? eta / len : 0;
      norm[b] = k;
      for (int i = 0; i < H; i++) o[i] = k * y[i];
    } else memcpy(o, y, H * sizeof(real));
  }
}

// d (B, H): gradient of the state after the step; becomes the direct gradient of the state before it (without dgates U).
// dxp (B, (G+1)H): gradients of tau, u[, r], eps. dg, dgt (H) are added to. A (B, heads, n, n): lam 1's frame gradient.
void step_bwd(int B, int H, int n, int flags, int f, real eta, real res, const real *kap, const real *xp, const real *h, const real *hout, const real *save,
              const real *g, const real *gt, real *d, real *dxp, real *dg, real *dgt, const real *R, real *A, const real *norm) {
  int G = flags & RESET ? 3 : 2, heads = (H + n - 1) / n;
  real mix[MAXH], rt[MAXH], hr[MAXH], e[MAXH], w[MAXH], dz[MAXH], dhr[MAXH], zr[MAXH], mm[MAXH], nn[MAXH], ke[MAXH], kn[MAXH];
  for (int b = 0; b < B; b++) {
    const real *eps = xp + (long)b * (G + 1) * H + G * H, *hb = h + (long)b * H, *ob = hout + (long)b * H;
    const real *tau = save + (long)b * 4 * H, *u = tau + H, *r = u + H, *c = r + H;
    real *db = d + (long)b * H, *dt = dxp + (long)b * (G + 1) * H, *du = dt + H, *dr = du + H, *de = dt + G * H;
    if (eta > 0) {
      real k = norm[b], s = dot(db, ob, H) / (eta * eta);
      for (int i = 0; i < H; i++) db[i] = k * (db[i] - s * ob[i]);
    }
    for (int i = 0; i < H; i++) {
      du[i] = db[i] * (hb[i] - c[i]) * u[i] * (1 - u[i]);
      dz[i] = db[i] * (1 - u[i]) * slope(c[i], f);
      db[i] *= u[i];
      dg[i] += dz[i] * eps[i];
      de[i] = g[i] * dz[i];
      dt[i] = 0;
    }
    if ((flags & MIX) && !(flags & MIXIN)) for (int i = 0; i < H; i++) { dgt[i] += dz[i] * tau[i]; dt[i] = gt[i] * dz[i]; }
    int after = (flags & RESET) && (flags & AFTER), before = (flags & RESET) && !(flags & AFTER);
    if (before) for (int i = 0; i < H; i++) hr[i] = r[i] * hb[i];
    else memcpy(hr, hb, H * sizeof(real));
    for (int k = 0; k < heads; k++) {
      int a = k * n, m = H - a < n ? H - a : n;
      real ie, it, ss;
      for (int i = a; i < a + m; i++) rt[i] = tau[i] + res * eps[i];
      int ok = frame(eps + a, rt + a, m, e, w, &ie, &it, &ss);
      if (R) {
        const int in = (flags & MIXIN) != 0;
        const real *Rk = R + ((long)b * heads + k) * n * n; real *Ak = A + ((long)b * heads + k) * n * n;
        if (after) for (int i = 0; i < m; i++) { real z = kap[a + i] * dot(Rk + i * n, hr + a, m); if (in) z += gt[a + i] * tau[a + i]; dr[a + i] = dz[a + i] * z; dz[a + i] *= r[a + i]; }
        for (int j = 0; j < m; j++) { dhr[a + j] = 0; mix[a + j] = dz[a + j]; dz[a + j] *= kap[a + j]; }
        for (int i = 0; i < m; i++) for (int j = 0; j < m; j++) dhr[a + j] += Rk[i * n + j] * dz[a + i];
        for (int i = 0; i < m; i++) for (int j = 0; j < m; j++) Ak[i * n + j] += dhr[a + i] * hr[a + j];
        if (!ok) continue;
        real is = 1 / sqrt(ss), em = 0;
        for (int i = 0; i < m; i++) { mm[i] = (e[i] + w[i]) * is; em += e[i] * mm[i]; }
        for (int i = 0; i < m; i++) { nn[i] = mm[i] - 2 * em * e[i]; ke[i] = kn[i] = 0; }
        for (int i = 0; i < m; i++) {
          real se = 0, sn = 0, ei = e[i], ni = nn[i]; real *row = Ak + i * n;
          for (int j = 0; j < m; j++) { se += row[j] * e[j]; sn += row[j] * nn[j]; ke[j] -= row[j] * ei; kn[j] -= row[j] * ni; }
          ke[i] += se; kn[i] += sn;
        }
        real ekn = dot(e, kn, m);
        for (int i = 0; i < m; i++) {
          real t_ = -2 * (kn[i] - ekn * (2 * e[i] + w[i])) * is * it; dt[a + i] += t_; de[a + i] += res * t_;
          de[a + i] += -2 * (ke[i] + (kn[i] - ekn * e[i]) * is) * ie;
        }
        for (int pass = 0; pass < 2; pass++) {  // A <- Q A Q^T, Q = H_m H_e
          const real *v = pass ? mm : e;
          for (int j = 0; j < m; j++) ke[j] = 0;
          for (int i = 0; i < m; i++) for (int j = 0; j < m; j++) ke[j] += v[i] * Ak[i * n + j];
          for (int i = 0; i < m; i++) {
            real *row = Ak + i * n, s = 0, vi = 2 * v[i];
            for (int j = 0; j < m; j++) { row[j] -= vi * ke[j]; s += row[j] * v[j]; }
            s *= 2;
            for (int j = 0; j < m; j++) row[j] -= s * v[j];
          }
        }
        continue;
      }
      if (!ok) {
        if (after) for (int i = a; i < a + m; i++) { dr[i] = dz[i] * (kap[i] * hr[i] + (flags & MIXIN ? gt[i] * tau[i] : 0)); dz[i] *= r[i]; }
        for (int i = a; i < a + m; i++) { mix[i] = dz[i]; dz[i] *= kap[i]; }
        memcpy(dhr + a, dz + a, m * sizeof(real));
        continue;
      }
      const real *q = hr + a; real *dd = dz + a;
      real p = dot(e, q, m), kk = (p + dot(w, q, m)) / ss;
      if (after) for (int i = 0; i < m; i++) {
        zr[i] = q[i] + 2 * p * w[i] - 2 * kk * (e[i] + w[i]);
        dr[a + i] = dd[i] * (kap[a + i] * zr[i] + (flags & MIXIN ? gt[a + i] * tau[a + i] : 0)); dd[i] *= r[a + i];
      }
      for (int i = 0; i < m; i++) { mix[a + i] = dd[i]; dd[i] *= kap[a + i]; }
      real dE = dot(dd, e, m), dW = dot(dd, w, m), dS = dE + dW, sg = dS / ss;
      real wdw = 2 * (p - kk) * dW + 2 * p * sg, ede = 2 * p * (dW - sg) - 2 * kk * dE + 2 * kk * dS;
      for (int i = 0; i < m; i++) {
        real s = e[i] + w[i], ds = -2 * kk * dd[i] - 2 * sg * q[i] + 4 * kk * sg * s;
        dhr[a + i] = dd[i] + 2 * (dW - sg) * e[i] - 2 * sg * w[i];
        real t_ = (2 * p * dd[i] + ds - wdw * w[i]) * it; dt[a + i] += t_; de[a + i] += res * t_;
        de[a + i] += (2 * dW * q[i] + ds - ede * e[i]) * ie;
      }
    }
    if (flags & MIXIN) for (int i = 0; i < H; i++) { dgt[i] += mix[i] * tau[i]; dt[i] += gt[i] * mix[i]; }
    if (before) for (int i = 0; i < H; i++) { dr[i] = dhr[i] * hb[i] * r[i] * (1 - r[i]); db[i] += dhr[i] * r[i]; }
    else for (int i = 0; i < H; i++) db[i] += dhr[i];
    if (after) for (int i = 0; i < H; i++) dr[i] *= r[i] * (1 - r[i]);
  }
}
