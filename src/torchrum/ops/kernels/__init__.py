"""Code that the kernels of several operators share; nothing here imports an operator.

Without Triton: ``machine`` (whether kernels can run here and on this call; autocast), ``linear`` (TF32 and bf16x3,
parameters of a cell and their gradients), ``masks`` (zoneout and dropout from a counter), ``flops`` (formulas for
torch's FLOP counter) and ``cuda`` (CUDA C++ at run time, the driver, graph capture).

In Triton: ``rows`` (arithmetic on one batch row), ``matmul`` and ``matmul_hopper`` (the matmul of a step),
``triton_launch`` (compilation, launches, CUDA graphs of time steps), ``rum_step`` and ``rum_step_backward`` (the RUM
step), ``gated_step`` (the gated RUM step), ``chain`` (a scan of one or more cells) and ``cell_rows`` (the row
kernels of its cells).
"""
