"""The least time a RUM's recurrent matmuls can take on the device that was measured."""

from torchrum.paper.bench.records import Row

PEAK_FLOPS = {"bfloat16": 788e12, "float16": 788e12, "float32": 394e12}
"""An H200's large matmuls, measured; float32 is TF32, at half the rate of bfloat16."""


def floor_ms(row: Row) -> float | None:
    """Milliseconds of h W_hh for all steps, and of its two backward matmuls; None for what is no RUM on a GPU."""
    shape = row.shape
    if shape.device != "cuda" or "lam" not in row.options or row.options["lam"] != 0 or row.mode == "training_step":
        return None
    matmuls = 3 if row.mode == "forward_backward" else 1
    flops = 2 * shape.B * shape.N * 2 * shape.N * shape.T * matmuls
    return flops / PEAK_FLOPS[shape.dtype] * 1e3 if shape.dtype in PEAK_FLOPS else None


def share_of_floor(row: Row) -> float | None:
    """Floor over measured time: 1 would be perfect."""
    floor = floor_ms(row)
    return None if floor is None or row.times is None else floor / row.times.median
