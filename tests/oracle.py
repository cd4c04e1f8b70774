"""What the kernel tests share: a RUM scan in float64, a design's run of it, a loss, how far two results are apart."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from tolerances import NORM_ERROR
from torchrum.ops.rum_scan import RumOptions, ScanInputs, designs, native, rum_scan_reference
from torchrum.ops.rum_scan.types import Copies

LEAVES = ScanInputs._fields[:6]
"""The inputs that have gradients."""


def draw_inputs(
    T: int, B: int, H: int, options: RumOptions, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> ScanInputs:
    """Random inputs; layer norm's parameters only where they are used, R0 never."""

    def normal(*shape: int, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return (mean + std * torch.randn(shape, device=device)).to(dtype)

    G = options.num_gates
    norms = (normal((G + 1) * H, mean=1.0, std=0.2), normal((G + 1) * H, std=0.2)) if options.layer_norm else ()
    return ScanInputs(normal(T, B, (G + 1) * H), normal(B, H), None, normal(G * H, H, std=H**-0.5), *norms)


def exact_scan(
    inputs: ScanInputs,
    options: RumOptions,
    grad_out: Tensor,
    grad_R: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Results and gradients by the reference, ``out``, ``R``, ``dxp``, ``dh0``, ...; in float64 unless told."""
    leaves = {
        name: part.detach().to(dtype, copy=True).requires_grad_()
        for name, part in inputs._asdict().items()
        if name in LEAVES and part is not None
    }
    out, R = rum_scan_reference(inputs._replace(**leaves), options)
    pairs = [(out, grad_out.to(dtype))] + ([(R, grad_R.to(dtype))] if R is not None and grad_R is not None else [])
    results, given = zip(*pairs, strict=True)
    grads = torch.autograd.grad(results, list(leaves.values()), given, allow_unused=True)
    found = {"out": out.detach(), **({} if R is None else {"R": R.detach()})}
    return found | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}


def run_design(
    design: Any, inputs: ScanInputs, options: RumOptions, grad_out: Tensor, grad_R: Tensor | None = None
) -> dict[str, Tensor]:
    """The same by a design's ``forward`` and ``backward``."""
    results = design.forward(inputs, options)
    grads = design.backward(grad_out, grad_R, inputs, results, options, inputs.R0 is not None)
    found = {"out": results.out, "R": results.R, **{f"d{name}": grad for name, grad in grads._asdict().items()}}
    return {name: part for name, part in found.items() if part is not None}


def relative_error(found: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    """|found - wanted| / |wanted|, over the whole tensor; of ``floor`` where ``wanted`` is smaller than that."""
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=floor))


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], error: float) -> None:
    """All names, all shapes, and each tensor within ``error`` of its norm."""
    assert found.keys() == wanted.keys()
    for name, want in wanted.items():
        assert found[name].shape == want.shape, name
        # a gradient that cancels to zero is zero up to roundings of its terms
        got = relative_error(found[name], want, floor=0.05)
        assert got <= error, f"{name}: relative error {got:.2e} over {error:.0e}"


def assert_rows_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """In float32, row by row too: a row that is wrong must not hide behind the others."""
    error = NORM_ERROR[torch.float32]
    for name in ("out", "dxp"):
        for row, want in enumerate(wanted[name].unbind(1)):
            difference = (found[name][:, row].double() - want).norm()
            assert difference <= error * want.norm() + 1e-12, f"{name} of row {row}"
    assert_close(found, wanted, error)


def tensors(results: tuple[Any, Any]) -> list[Tensor]:
    """All tensors of a layer's results, the data of a packed sequence among them."""
    output, hidden = results
    output = output.data if isinstance(output, PackedSequence) else output
    return [output, *((hidden,) if isinstance(hidden, Tensor) else hidden)]


def loss_of(results: tuple[Any, Any]) -> Tensor:
    """A number in which every entry of a layer's results counts, and differently."""
    parts = [part.double() for part in tensors(results)]
    weighted = [part * torch.linspace(-1, 2, part.numel(), device=part.device).view_as(part) for part in parts]
    return torch.stack([part.sum() for part in weighted]).sum()


def capture(run: Callable[[], Any], warm_up: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of ``run``, and what it returned; ``warm_up`` runs first, on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        warm_up()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


def layer_error(layer: Any, reference: Any, x: Tensor, hx: Any = None) -> dict[str, float]:
    """Relative errors of a layer's results and gradients against a reference of float64 with the same weights."""

    def run(layer: Any, dtype: torch.dtype) -> dict[str, Tensor]:
        given = x.detach().to(dtype, copy=True).requires_grad_()
        state = tuple(part.to(dtype) for part in hx) if isinstance(hx, tuple) else None if hx is None else hx.to(dtype)
        results = layer(given, state)
        leaves = {"x": given, **dict(layer.named_parameters())}
        grads = torch.autograd.grad(loss_of(results), list(leaves.values()))
        named = {f"result {i}": part.detach() for i, part in enumerate(tensors(results))}
        return named | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}

    found, wanted = run(layer, next(layer.parameters()).dtype), run(reference, torch.float64)
    return {name: relative_error(found[name], wanted[name]) for name in wanted}


@contextmanager
def plain_calls_by(design: Any) -> Iterator[None]:
    """Plain calls on the CPU take a GPU's design, whose kernels are emulated."""
    designs.clear_design_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(design, "obstacle", lambda *_: None)
        patch.setattr(native, "projects", lambda *_: False)
        yield
    designs.clear_design_cache()


def assert_copies_are_the_results(design: Any, inputs: ScanInputs, options: RumOptions) -> None:
    """What a design by the driver writes for the user, where rows end at different steps too."""
    T, B, H = *inputs.xp.shape[:2], inputs.weight_hh.shape[1]
    for lengths in (None, torch.tensor([T, 1, *[T - 1] * (B - 2)])):
        last, out = torch.full((1, B, H), torch.nan), torch.full((T, B, H), torch.nan)
        R = torch.full((1, B, H, H), torch.nan) if options.keeps_rotation else None
        found = design.forward(inputs._replace(lengths=lengths), options, True, Copies(last, out, R))
        assert torch.equal(out, found.out)
        assert torch.equal(last[0], found.out[-1])
        assert R is None or torch.equal(R[0], found.R)


def assert_bias_is_added(design: Any, inputs: ScanInputs, bias: Tensor, options: RumOptions) -> None:
    """A design by the driver, given xp and the bias that it lacks, computes what it does with their sum."""
    whole, need_R0 = inputs._replace(xp=inputs.xp + bias), inputs.R0 is not None
    results, wanted_results = design.forward(inputs, options, True, Copies(), bias), design.forward(whole, options)
    assert torch.equal(results.out, wanted_results.out)
    grad_out = torch.randn_like(results.out)
    found = design.backward(grad_out, None, inputs, results, options, need_R0, bias)
    wanted = design.backward(grad_out, None, whole, wanted_results, options, need_R0)
    for name, grad in wanted._asdict().items():
        assert grad is None or torch.equal(getattr(found, name), grad), name


def assert_plain_calls_match(layer: Any, x: Tensor, hx: Any, most: float) -> None:
    """A layer's plain calls, against float64: results and gradients, and results that a user writes to.

    To be run where ``layer`` takes the design that is tested; the reference does not.
    """
    reference = copy.deepcopy(layer).double()
    reference.backend = "reference"
    errors = layer_error(layer, reference, x, hx)
    assert all(error <= most for error in errors.values()), errors

    def gradients(write: bool) -> list[Tensor]:
        results = layer(x, hx)
        loss = loss_of(results)
        if write:
            kept = [part.detach().clone() for part in tensors(results)]
            for i, part in enumerate(tensors(results)):
                part.detach().fill_(7.0)  # behind autograd's back
                assert all(torch.equal(*pair) for pair in zip(tensors(results)[i + 1 :], kept[i + 1 :], strict=True))
        return list(torch.autograd.grad(loss, list(layer.parameters())))

    assert all(map(torch.equal, gradients(False), gradients(True)))
    with torch.no_grad():
        inferred = tensors(layer(x, hx))
    assert all(map(torch.equal, inferred, tensors(layer(x, hx))))
