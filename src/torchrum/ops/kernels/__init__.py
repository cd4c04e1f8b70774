"""What the kernels of several operators share; nothing here imports an operator.

Without Triton: ``machine`` (can kernels run here), ``precision`` and ``bf16x3`` (how float32 is multiplied), ``masks``
(zoneout and dropout from a counter), ``weights`` (of a cell), ``weight_gradient``, ``second_order`` (second derivatives
by the reference), ``watching`` (who looks at a call), ``nvrtc`` (CUDA C++ at run time), ``driver`` (memory filled by
CUDA's driver), ``mail`` (kept for blocks to talk through) and ``capture`` (CUDA graphs).

In Triton: ``rows`` (arithmetic on one batch row), ``matmul`` and ``matmul_hopper`` (the matmul of a step),
``row_launch`` (how row kernels are launched), ``step_graphs`` (CUDA graphs of time steps), ``compiling`` (kernels side
by side), ``rum_step``, ``rum_step_backward`` and ``rum_norms`` (a RUM's step), ``lstm_rows`` and ``lstm_stages`` (an
LSTM's), ``chain`` and ``chain_rows`` (a scan of several cells, and what their row kernels share).
"""
