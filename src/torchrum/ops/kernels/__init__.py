"""What the kernels of several operators share; nothing here imports an operator.

Without Triton: ``machine`` (can kernels run here), ``precision`` and ``bf16x3`` (how float32 is multiplied), ``masks``
(zoneout and dropout from a counter), ``weight_gradient``, ``nvrtc`` (CUDA C++ at run time), ``driver`` (memory filled
and copied by CUDA's driver), ``capture`` (CUDA graphs) and ``weights``.

In Triton: ``rows`` (arithmetic on one batch row), ``matmul`` and ``matmul_hopper`` (the matmul of a step),
``row_launch`` (how row kernels are launched), ``step_graphs`` (CUDA graphs of time steps), ``compiling`` (kernels side
by side), ``rum_step``, ``rum_step_backward`` and ``rum_norms`` (a RUM's step), ``lstm_rows`` and ``lstm_stages`` (an
LSTM's), ``chain`` and ``chain_rows`` (a scan of several cells, and what their row kernels share).
"""
