"""The one table of tolerances. A wider one is a change with a reason.

TOL[dtype] is ``{"rtol": ..., "atol": ...}`` for ``torch.testing.assert_close``: about a hundred roundings of the dtype
for float64 and float32, which add up over a few dot products, and a few roundings of the result for the 16-bit dtypes,
whose arithmetic is float32 inside.
"""

import torch

TOL: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 2e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2},
    torch.float16: {"rtol": 3e-3, "atol": 3e-3},
}

DEEP: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 1e-9, "atol": 1e-9},
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
}
"""The same through many steps, a backward or updates, where roundings add up; that of float64 is far below what a
single number in float32 on the way would bring in."""
CARRIED: dict[str, float] = {"rtol": 1e-5, "atol": 1e-5}
"""A text in pieces, with the state carried, against an uncut pass in float32; 1.2e-6 is the most seen, with 6 seeds and
1 and 2 threads."""
ORTHOGONAL: dict[torch.dtype, dict[str, float]] = {
    torch.float64: {"rtol": 0, "atol": 1e-12},
    torch.float32: {"rtol": 0, "atol": 2e-6},
}
"""Q Q^T against the identity, for matrices of up to a hundred rows."""

NORM_ERROR: dict[torch.dtype, float] = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""|found - exact| / |exact| of a whole tensor, results and gradients of a scan by a kernel against float64."""
TF32_ERROR = 5e-3
"""The same where torch takes TF32 for float32 matmuls."""
