"""The LSTM scan on the GPU: a chain of one cell. Imported on first use, since it needs Triton."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from torchrum.ops.kernels.chain import LstmBackward, LstmForward, Plan, chain_scan
from torchrum.ops.kernels.weights import CellWeights
from torchrum.ops.lstm_scan.reference import LstmInputs, LstmOptions, lstm_scan_reference


@functools.lru_cache(256)
def lstm_plans(hidden: int, options: LstmOptions) -> tuple[Plan, ...]:
    """The chain of an LSTM, which reads its own state."""
    plan = Plan(
        stages=(LstmForward, LstmBackward),
        number=0,
        hidden=hidden,
        inputs=(hidden,),
        blocks=4,
        norms=5 if options.layer_norm else 0,
        state=(0, 1),
        plain=(0, 0),
        dropped=None,
        dropout=0.0,
        flags=tuple(options.kernel_flags().items()),
    )
    return (plan,)


@torch.compiler.disable  # graphs and kernels of its own: a compiler has nothing to add
def lstm_scan_fused(inputs: LstmInputs, options: LstmOptions) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments and results of ``lstm_scan_reference``."""
    xp, h0, c0, weight_hh, ln_weight, ln_bias, lengths, seed = inputs

    def reference(xp: Tensor, states: Sequence[Tensor], weights: Sequence[CellWeights]) -> tuple[Tensor, ...]:
        (h0, c0), (_, weight_hh, _, ln_weight, ln_bias) = states, weights[0]
        return lstm_scan_reference(LstmInputs(xp, h0, c0, weight_hh, ln_weight, ln_bias, lengths, seed), options)

    weights = [CellWeights(None, weight_hh, None, ln_weight, ln_bias)]
    plans = lstm_plans(weight_hh.shape[1], options)
    out, (h, c) = chain_scan(plans, xp, (h0, c0), weights, seed, lengths, options.training, reference)
    return out, h, c
