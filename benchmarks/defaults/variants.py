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
