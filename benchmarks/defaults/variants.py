"""The variants of RUM, lam 0; each line differs from another in one or two choices."""
TODAY = dict(eta="sqrt", embed_scale=2.0, embed_bias=1.0, gate_scale=0.25, u_bias=1.0)
PAPER = dict(activation="relu", embed_scale=None, gate_scale=1.0, tau_bias=1.0, u_bias=1.0)
R = dict(reset=True)
G4 = dict(reset=True, embed_scale=4.0, gain=0.125)
G4B = dict(reset=True, embed_scale=4.0, gain=0.125, embed_bias=4.0)
# nn.GRU's shapes: tau from the state only, so W_ih is (3H, I) and W_hh (3H, H)
S = dict(reset=True, x_gates="ur", embed_scale=4.0, gain=0.125, embed_bias=4.0, tau_noise=1.0)
VARIANTS = {
    "today": TODAY,
    "paper": PAPER,
    "small": dict(embed_scale=0.5),
    "small-bias": dict(embed_scale=0.5, embed_bias=0.5),
    "reset": dict(R, embed_scale=0.5),
    "reset-bias": dict(R, embed_scale=0.5, embed_bias=0.5),
    "reset-h8": dict(R, embed_scale=0.5, embed_bias=0.5, heads=8),
    "g4": G4,
    "g4-bias": G4B,
    "g4-bias-u0": dict(G4B, u_bias=0.0),
    "g4-bias-r1": dict(G4B, r_bias=1.0),
    "g4-bias-h8": dict(G4B, heads=8),
    "g4-bias-h2": dict(G4B, heads=2),
    "g4-bias-mix": dict(G4B, mix=1.0, gate_scale=0.5),
    "g4-bias-h8-mix": dict(G4B, heads=8, mix=1.0, gate_scale=0.5),
    "g8-bias-h8-mix": dict(reset=True, embed_scale=8.0, gain=0.0625, embed_bias=8.0, heads=8, mix=1.0, gate_scale=0.5),
    "g4-bias-h8-mix-u0": dict(G4B, heads=8, mix=1.0, gate_scale=0.5, u_bias=0.0),
    "g4-bias-mix-after": dict(G4B, mix=1.0, gate_scale=0.5, reset_after=True),
    "mix-only": dict(embed_scale=4.0, gain=0.125, embed_bias=4.0, mix=1.0, gate_scale=0.5),
    "mix-only-h8": dict(embed_scale=4.0, gain=0.125, embed_bias=4.0, mix=1.0, gate_scale=0.5, heads=8),
    "shape": S,
    "shape-h8": dict(S, heads=8),
    "shape-h8-mix": dict(S, heads=8, mix=1.0, gate_scale=0.5),
    "shape-h8-mix-u0": dict(S, heads=8, mix=1.0, gate_scale=0.5, u_bias=0.0),
}
# second round, with nn.GRU's weights: W_ih (3H, I), W_hh (3H, H), candidate tanh(eps + r * (tau + R(eps, tau) h))
GRU = dict(init="gru", embed_scale="gru", eps_k=1.0, x_gates="ur", reset=True, reset_after=True, mix=1.0, learn_mix=False,
         mix_in=True, u_bias=0.0, r_bias=-1.0, heads=8)
IN = dict(reset=True, reset_after=True, mix=1.0, mix_in=True, embed_scale=4.0, gain=0.125, embed_bias=1.0, heads=8, gate_scale=0.5,
          u_bias=0.0)
SECOND = {
    "s": GRU,
    "s-h16": dict(GRU, heads=16),
    "s-h4": dict(GRU, heads=4),
    "s-h2": dict(GRU, heads=2),
    "s-h0": dict(GRU, heads=0),
    "s-r0": dict(GRU, r_bias=0.0),
    "s-r2": dict(GRU, r_bias=-2.0),
    "s-half": dict(GRU, share=0.5),
    "s-half-r0": dict(GRU, share=0.5, r_bias=0.0),
    "s-u.5": dict(GRU, u_bias=0.5),
    "s-u-.5": dict(GRU, u_bias=-0.5),
    "s-res": dict(GRU, res=1.0),
    "s-k.5": dict(GRU, kap=0.5),
    "s-orth": dict(GRU, init="orth", gate_scale=0.5, embed_scale=0.5),
    "s-fix8": dict(GRU, embed_scale=4.0, gain=0.125, learn_gain=False, embed_bias=1.0),
    "s-tn": dict(GRU, tau_noise=0.3),
    "in": IN,
    "in-r": dict(IN, r_bias=-1.0),
    "shape-r": dict(IN, x_gates="ur", tau_noise=0.1, r_bias=-1.0),
    "before": dict(GRU, reset_after=False, mix_in=False),
}
HALF = dict(GRU, share=0.5)
GAIN = dict(embed_scale=4.0, gain=1.0, gain_like_gru=True, embed_bias=1.0, eps_k=0.0)
SECOND |= {
    "half-h4": dict(HALF, heads=4),
    "half-h2": dict(HALF, heads=2),
    "half-h16": dict(HALF, heads=16),
    "third": dict(GRU, share=0.34),
    "half-r.5": dict(HALF, r_bias=-0.5),
    "half-u.5": dict(HALF, u_bias=0.5),
    "half-orth": dict(HALF, init="orth", gate_scale=0.5, embed_scale="gru"),
    "orth": dict(GRU, init="orth", gate_scale=0.5, embed_scale="gru"),
    "half-gain": dict(HALF, **GAIN),
    "gain": dict(GRU, **GAIN),
    "gain-orth": dict(GRU, **GAIN, init="orth", gate_scale=0.5),
    "half-gain-orth": dict(HALF, **GAIN, init="orth", gate_scale=0.5),
    "in-like": dict(IN, r_bias=-1.0, gain_like_gru=True),
    "in-like-half": dict(IN, r_bias=-1.0, gain_like_gru=True, share=0.5),
}
VARIANTS.update(SECOND)

# third round: other starts of the same cell, and the same starts for a GRU (share 0) as a control
BASE = dict(HALF, r_bias=-0.5)
ORTH = dict(h_orth={"t": 1.0, "u": 1.0, "r": 1.0})
THIRD = {
    "half-r.5": BASE,
    "full-r.5": dict(BASE, share=1.0),
    "x-glorot": dict(BASE, x_init="glorot"),
    "x-.5": dict(BASE, x_init=0.5),
    "h-orth": dict(BASE, **ORTH),
    "n-orth": dict(BASE, h_orth={"t": 1.0}),
    "n-orth.5": dict(BASE, h_orth={"t": 0.5}),
    "keras": dict(BASE, x_init="glorot", **ORTH),
    "spread-1-2": dict(BASE, u_spread=(-1.0, 2.0)),
    "spread0-3": dict(BASE, u_spread=(0.0, 3.0)),
    "spread-plain": dict(BASE, u_spread=(-1.0, 2.0), spread_where="plain"),
    "spread-plain0-4": dict(BASE, u_spread=(0.0, 4.0), spread_where="plain"),
    "keras-spread": dict(BASE, x_init="glorot", **ORTH, u_spread=(-1.0, 2.0)),
    "glorot-spread": dict(BASE, x_init="glorot", u_spread=(-1.0, 2.0)),
    "glorot-spread-r0": dict(BASE, x_init="glorot", u_spread=(-1.0, 2.0), r_bias=0.0),
    "glorot-n-orth": dict(BASE, x_init="glorot", h_orth={"t": 1.0}),
    "glorot-n-orth-spread": dict(BASE, x_init="glorot", h_orth={"t": 1.0}, u_spread=(-1.0, 2.0)),
    "full-glorot-spread": dict(BASE, x_init="glorot", u_spread=(-1.0, 2.0), share=1.0),
    "glorot-in-gain": dict(IN, share=0.5, r_bias=-0.5, gain_like_gru=True, u_spread=(-1.0, 2.0)),
    "gru-glorot": dict(BASE, share=0.0, r_bias=0.0, x_init="glorot"),
    "gru-keras": dict(BASE, share=0.0, r_bias=0.0, x_init="glorot", **ORTH),
    "gru-spread": dict(BASE, share=0.0, r_bias=0.0, u_spread=(-1.0, 2.0)),
    "gru-glorot-spread": dict(BASE, share=0.0, r_bias=0.0, x_init="glorot", u_spread=(-1.0, 2.0)),
}
VARIANTS.update(THIRD)

# the same round, second part: between nn.GRU's and Keras' starts
ORTH7 = dict(h_orth={"t": 0.7, "u": 0.7, "r": 0.7})
BETWEEN = {
    "orth-x1.4": dict(BASE, x_init=(1.4,), **ORTH),
    "orth-x1.7": dict(BASE, x_init=(1.7,), **ORTH),
    "orth.7-x1.4": dict(BASE, x_init=(1.4,), **ORTH7),
    "orth.7-x1": dict(BASE, **ORTH7),
    "n-orth-x1.4": dict(BASE, x_init=(1.4,), h_orth={"t": 1.0}),
    "orth-wide": dict(BASE, x_init="wide", **ORTH),
    "orth.7-wide": dict(BASE, x_init="wide", **ORTH7),
    "keras-full": dict(BASE, x_init="glorot", **ORTH, share=1.0),
    "gru-orth.7-x1.4": dict(BASE, share=0.0, r_bias=0.0, x_init=(1.4,), **ORTH7),
    "gru-orth-wide": dict(BASE, share=0.0, r_bias=0.0, x_init="wide", **ORTH),
}
VARIANTS.update(BETWEEN)
