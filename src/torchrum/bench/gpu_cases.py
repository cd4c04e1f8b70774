"""What the GPU suite compares, the promised cases first: a run that is cut short has those."""

from dataclasses import dataclass
from typing import Any

from .work import Shape

BATCH, STEPS = 128, 150
SIZES = (100, 250, 256, 704, 1000, 1024, 2000)
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

PROMISED = ("fused", "fused graphed", "gru graphed")
RIVALS = ("gru", "lstm", "lstm graphed", "gru= graphed", "lstm= graphed")
FEATURES: dict[str, dict[str, Any]] = {
    "eta": {"lam": 0, "eta": 1.0},
    "norms": {"lam": 0, "eta": 1.0, "layer_norm": True, "zoneout": 0.1},
    "lam1": {"lam": 1},
}


@dataclass(frozen=True)
class Case:
    """Contestants at one shape, timed in turns.

    A contestant is a name of ``make_layer``, with `` graphed`` where its whole pass is one CUDA graph, or `` compiled``
    where ``torch.compile`` made its step.
    """

    name: str
    shape: Shape
    options: dict[str, Any]
    """Of the RUM."""
    contestants: tuple[str, ...]
    modes: tuple[str, ...] = ("forward_backward",)
    kind: str = "layer"
    """layer, recall or penn_treebank."""
    check_error: bool = False
    """Compare outputs and gradients with float64, at a few steps of the same size."""
    samples: int | None = None
    """Fewer than usual, for what is slow."""


def layer_case(
    features: str, N: int, dtype: str, contestants: tuple[str, ...], T: int = STEPS, suffix: str = "", **more: Any
) -> Case:
    """A case with its usual name, as ``eta-bf16-n1000``."""
    name = f"{features}-{SHORT[dtype]}-n{N}" + (f"-t{T}" if T != STEPS else "") + suffix
    return Case(name, Shape(N, T, BATCH, dtype, "cuda"), FEATURES[features], contestants, **more)


def gpu_cases() -> list[Case]:
    """The suite in the order of its promises, then the rest of the grid."""
    both = ("forward_backward", "forward")  # the first call of a shape is the one that trains
    cases = [
        layer_case("eta", N, "bfloat16", PROMISED, modes=both, check_error=True) for N in (1000, 704, 1024, 2000, 256)
    ]
    cases += [layer_case("norms", N, "bfloat16", PROMISED, check_error=True) for N in (1000, 704, 1024, 2000, 256)]
    cases.append(layer_case("eta", 250, "float32", PROMISED, T=220, check_error=True))
    cases.append(layer_case("lam1", 100, "float32", ("fused", "fused graphed"), T=1020, check_error=True))
    recall = Shape(N=50, T=53, B=BATCH, dtype="float32", device="cuda")
    cases.append(
        Case(
            "recall-n50", recall, FEATURES["lam1"], ("fused graphed", "fused"), modes=("training_step",), kind="recall"
        )
    )
    # bound by launches, so a step costs the same at any T; T is short because autograd keeps 11 MB a step with lam 1
    authors = ("authors", "authors graphed", "torch", "fused graphed", "gru graphed")
    cases.append(layer_case("eta", 1000, "float32", authors, T=30, suffix="-authors", samples=10))
    cases.append(layer_case("eta", 100, "float32", authors, T=30, suffix="-authors", samples=10))
    cases.append(layer_case("lam1", 100, "float32", authors[:4], T=30, suffix="-authors", samples=10))
    penn = Shape(N=1000, T=STEPS, B=BATCH, dtype="bfloat16", device="cuda")
    cases.append(
        Case("ptb-fs-rum", penn, {}, ("fused graphed",), modes=("training_step",), kind="penn_treebank", samples=10)
    )
    cases += [layer_case("eta", N, "bfloat16", RIVALS, suffix="-rivals") for N in (1000, 704, 1024, 2000, 256)]
    everyone = (*PROMISED, *RIVALS)
    cases += [
        layer_case("eta", N, dtype, everyone, check_error=True)
        for dtype in ("float32", "float16", "bfloat16")
        for N in SIZES
        if dtype != "bfloat16" or N in (100, 250)
    ]
    cases.append(layer_case("norms", 1000, "float32", ("ln_lstm", "ln_lstm graphed"), suffix="-ln-lstm", samples=10))
    cases.append(layer_case("norms", 1000, "float32", ("ln_lstm compiled",), suffix="-ln-lstm-compiled", samples=10))
    return cases


def quick_cases() -> list[Case]:
    """The same kinds of case at tiny sizes."""
    small = Shape(N=16, T=7, B=4, dtype="float32", device="cuda")
    tiny: dict[str, Any] = {"shape": small, "modes": ("forward", "forward_backward")}
    return [
        Case("quick-eta", options=FEATURES["eta"], contestants=(*PROMISED, "authors"), check_error=True, **tiny),
        Case(
            "quick-lam1", options=FEATURES["lam1"], contestants=("fused", "authors graphed"), check_error=True, **tiny
        ),
        Case("quick-recall", small, FEATURES["lam1"], ("fused graphed",), modes=("training_step",), kind="recall"),
    ]
