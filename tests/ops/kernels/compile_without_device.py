"""Run a scan on a driver that compiles for Hopper but launches nothing, and print how many kernels each pass compiled,
and how many of them all differ.

For a process of its own: kernels are real ones only where Triton's interpreter was never asked for. Triton is imported
late, since pytest imports this file before the tests that do ask for it.
"""

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

compiled: list[str] = []


class Quiet:
    """A stream, an event or a graph with nothing to do."""

    def __getattr__(self, name: str) -> "Quiet":
        return Quiet()

    def __call__(self, *args: object, **kwargs: object) -> None:
        pass


class Utils:
    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 0, 0, 32, 0, 1024


class Driver:
    utils = Utils()

    @staticmethod
    def launcher_cls(source: Any, metadata: Any) -> Quiet:
        return Quiet()

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def stand_in() -> None:
    """Let CPU tensors pass for tensors of a Hopper device."""
    import triton

    triton.runtime.driver.set_active(Driver())
    triton.knobs.compilation.listener = lambda metadata, **_: compiled.append(metadata["hash"])
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: type("Properties", (), {"multi_processor_count": 132})  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
    torch.cuda.current_stream = lambda *_: Quiet()  # type: ignore[assignment]
    torch.cuda.device = lambda *_: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.cuda.CUDAGraph = Quiet  # type: ignore[assignment,misc]
    from torchrum.ops.kernels import matmul, triton_launch

    triton_launch._DeviceResources = Quiet  # type: ignore[assignment,misc]
    triton_launch.recording = lambda *_, **__: contextlib.nullcontext()  # type: ignore[assignment]
    triton_launch._prefer_shared = lambda function: None  # type: ignore[assignment]
    matmul._hopper = lambda device: True  # type: ignore[assignment]


Pass = Callable[[], Any]


def stepwise(T: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Pass, Pass]:
    from torchrum.ops.rum_scan import RumOptions, ScanInputs, stepwise

    B, H = 3, 40
    options = RumOptions(eta=1.0, layer_norm=True, zoneout=0.1, training=True)
    xp, h0, weight = (torch.ones(shape, dtype=dtype) for shape in ((T, B, 3 * H), (B, H), (2 * H, H)))
    inputs = ScanInputs(xp, h0, None, weight, torch.ones(3 * H), torch.ones(3 * H), seed=torch.tensor(1))
    results: list[Any] = []

    def forward() -> None:
        results[:] = [stepwise.forward(inputs, options)]

    grad_out = torch.ones(T, B, H, dtype=dtype)
    return forward, lambda: stepwise.backward(grad_out, None, inputs, results[0], options, False)


def stepwise_tf32(T: int) -> tuple[Pass, Pass]:
    torch.set_float32_matmul_precision("high")
    return stepwise(T, torch.float32)


def gated(T: int) -> tuple[Pass, Pass]:
    from torchrum.ops.gated_scan import GatedInputs, GatedOptions, stepwise

    B, H = 3, 40
    options = GatedOptions(rotated_units=24, zoneout=0.1, training=True)
    xp, h0, weight, bias = (torch.ones(shape) for shape in ((T, B, 3 * H), (B, H), (3 * H, H), (3 * H,)))
    inputs = GatedInputs(xp, h0, weight, bias, seed=torch.tensor(1))
    results: list[Any] = []

    def forward() -> None:
        results[:] = stepwise.forward(inputs, options)

    return forward, lambda: stepwise.backward(torch.ones(T, B, H), inputs, *results, options)


def fast_slow(T: int, slow: str = "rum", **words: Any) -> tuple[Pass, Pass]:
    from torchrum.cells.fast_slow import fast_slow as make_cell
    from torchrum.ops.fast_slow_scan.fused import fast_slow_scan_fused

    B = 3
    cell = make_cell(5, 40, slow_size=48, slow=slow, cell_dropout=0.3, zoneout=0.1, zoneout_cell=0.5, **words)
    state = cell.initial_state(B, device=torch.device("cpu"), dtype=torch.float32)
    inputs, options = cell.scan_inputs(torch.ones(T, B, 5), state), cell.scan_options()
    inputs = inputs._replace(xp=inputs.xp.detach().bfloat16().requires_grad_(), seed=torch.tensor(1))
    results: list[torch.Tensor] = []

    def forward() -> None:
        results[:] = [fast_slow_scan_fused(inputs, options)[0]]

    return forward, lambda: results[0].float().sum().backward()


SCANS: dict[str, Callable[[int], tuple[Pass, Pass]]] = {
    "stepwise": stepwise,
    "stepwise_tf32": stepwise_tf32,
    "gated": gated,
    "fast_slow": lambda T: fast_slow(T, eta=1.0),
    "fast_slow_gated": lambda T: fast_slow(T, "rum-gated", state_dropout=0.2),
    "fast_slow_rotational": lambda T: fast_slow(T, "rotational_lstm", fast="rotational_lstm", state_dropout=0.2),
}


def main(name: str) -> None:
    stand_in()
    make = SCANS[name]
    counts = []
    for T, capturing in ((4, False), (4, True), (5, False)):
        torch.cuda.is_current_stream_capturing = lambda capturing=capturing: capturing  # type: ignore[assignment,misc]
        for run in make(T):
            before = len(compiled)
            run()
            counts.append(len(compiled) - before)
    print(json.dumps({"counts": counts, "different": len(set(compiled))}))


if __name__ == "__main__":
    main(sys.argv[1])
