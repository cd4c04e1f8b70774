"""Code that the kernels of several operators share; nothing here imports an operator.

Without Triton: ``machine`` (whether kernels can run here and on this call), ``precision`` (autocast, TF32 and bf16x3),
``masks`` (zoneout and dropout from a counter), ``weights`` (parameters of a cell and their gradients), ``flops`` (what
torch's counter counts for the operators) and ``cuda`` (CUDA C++ at run time, the driver, graph capture).

In Triton: ``rows`` (arithmetic on one batch row), ``matmul`` and ``matmul_hopper`` (the matmul of a step),
``triton_launch`` (compiling and launching), ``step_graphs`` (CUDA graphs of time steps), ``rum_step`` and
``rum_step_backward`` (the RUM step), ``chain`` (a scan of one or more cells) and ``cell_rows`` (the row kernels of its
cells).
"""
