"""What the GPU suite compares, those with a target first: a run that is cut short has them."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torchrum.paper.bench.work import Shape

BATCH, STEPS = 128, 150
SIZES = (100, 250, 256, 704, 1000, 1024, 2000)
TARGET_SIZES = (704, 1000, 1024, 2000, 256)
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

TARGETED = ("fused", "fused graphed", "gru graphed")
BASELINES = ("gru", "lstm", "lstm graphed", "gru= graphed", "lstm= graphed")
FEATURES: dict[str, dict[str, Any]] = {
    "eta": {"lam": 0, "eta": 1.0},
    "norms": {"lam": 0, "eta": 1.0, "layer_norm": True, "zoneout": 0.1},
    "lam1": {"lam": 1},
    "plain": {"lam": 0},
}


class Implementation(NamedTuple):
    """An implementation's name taken apart."""

    kind: str
    """A name of ``make_layer``."""
    graphed: bool
    """Its whole pass is one CUDA graph."""
    compiled: bool
    """``torch.compile`` made its step."""
    stepwise: bool
    """Insists on a matmul and a row kernel per step, where the persistent kernels would run."""


def implementation(name: str) -> Implementation:
    """Take apart a name such as ``fused stepwise graphed``."""
    kind, *words = name.split()
    return Implementation(kind, "graphed" in words, "compiled" in words, "stepwise" in words)


@dataclass(frozen=True)
class Case:
    """Implementations at one shape, timed in turns."""

    name: str
    shape: Shape
    options: dict[str, Any]
    """Of the RUM."""
    implementations: tuple[str, ...]
    """See :func:`implementation`."""
    modes: tuple[str, ...] = ("forward_backward",)
    kind: str = "layer"
    """layer, recall or penn_treebank."""
    check_error: bool = False
    """Compare outputs and gradients with float64, at a few steps of the same size."""
    samples: int | None = None
    """Fewer than usual for what is slow, more for calls so short that the host's noise shows."""
    precision: str = "high"
    """Of float32 matmuls: ``high`` is TF32, as cuDNN's layers do by default, ``highest`` FP32 (TF32 off)."""


def layer_case(
    features: str, N: int, dtype: str, implementations: tuple[str, ...], T: int = STEPS, suffix: str = "", **more: Any
) -> Case:
    """A case with its usual name, as ``eta-bf16-n1000``."""
    name = f"{features}-{SHORT[dtype]}-n{N}" + (f"-t{T}" if T != STEPS else "") + suffix
    return Case(name, Shape(N, T, BATCH, dtype, "cuda"), FEATURES[features], implementations, **more)


def target_cases() -> list[Case]:
    """The cases that have a target, the surest and the most telling first."""
    cases = [layer_case("eta", N, "bfloat16", TARGETED, check_error=True) for N in TARGET_SIZES]
    # matmuls in FP32: a memory that is turned a thousand times has no digits to give away
    exact: dict[str, Any] = {"precision": "highest"}
    cases.append(layer_case("lam1", 100, "float32", ("fused", "fused graphed"), T=1020, check_error=True, **exact))
    recall, ours = Shape(N=50, T=53, B=BATCH, dtype="float32", device="cuda"), ("fused graphed", "fused")
    cases.append(Case("recall-n50", recall, FEATURES["lam1"], ours, modes=("training_step",), kind="recall", **exact))
    penn = Shape(N=1000, T=STEPS, B=BATCH, dtype="bfloat16", device="cuda")
    cases.append(Case("ptb-fs-rum", penn, {}, ours, modes=("training_step",), kind="penn_treebank"))
    cases.append(layer_case("eta", 250, "float32", TARGETED, T=220, check_error=True))
    cases += [layer_case("norms", N, "bfloat16", TARGETED, check_error=True) for N in TARGET_SIZES]
    return cases


def plain_cases() -> list[Case]:
    """Plain calls, whose kernels take a fraction of the time: the rest is Python and launches."""

    def case(name: str, features: str, N: int, T: int, B: int, mode: str = "forward_backward") -> Case:
        shape = Shape(N, T, B, "float32", "cuda")
        return Case(f"plain-{name}", shape, FEATURES[features], ("fused", "gru"), modes=(mode,), samples=300)

    return [
        case("lam1-n50", "lam1", 50, 53, BATCH),
        case("n100", "plain", 100, 100, BATCH),
        case("n128-b16", "plain", 128, 32, 16),
        case("step", "plain", 64, 1, 1, "forward"),
    ]


def gpu_cases() -> list[Case]:
    """The cases with a target, plain calls, their baseline models, then the rest of the grid."""
    cases = [*target_cases(), *plain_cases()]
    # bound by launches, so a step costs the same at any T; T is short because autograd keeps 11 MB per step with lam 1
    authors = ("authors", "authors graphed", "torch", "fused graphed", "gru graphed")
    slow: dict[str, Any] = {"T": 30, "suffix": "-authors", "samples": 10}
    cases.append(layer_case("eta", 1000, "float32", authors, **slow))
    cases.append(layer_case("lam1", 100, "float32", authors[:4], **slow))
    cases += [layer_case("eta", N, "bfloat16", BASELINES, suffix="-baselines") for N in TARGET_SIZES]
    cases += [replace(case, modes=("forward",), check_error=False) for case in cases[: len(TARGET_SIZES)]]
    norms = ("ln_lstm", "ln_lstm graphed", "ln_lstm_fused", "ln_lstm_fused graphed", "fused graphed")
    cases.append(layer_case("norms", 1000, "bfloat16", norms, suffix="-ln-lstm", samples=10))
    everyone = (*TARGETED, *BASELINES)
    cases += [
        layer_case("eta", N, dtype, everyone, check_error=True)
        for dtype in ("float32", "float16", "bfloat16")
        for N in SIZES
        if dtype != "bfloat16" or N in (100, 250)
    ]
    cases.append(layer_case("eta", 100, "float32", authors, **slow))
    cases.append(layer_case("norms", 1000, "bfloat16", ("ln_lstm compiled",), suffix="-ln-lstm-compiled", samples=10))
    return cases


def quick_cases() -> list[Case]:
    """The same kinds of case at tiny sizes."""
    small = Shape(N=16, T=7, B=4, dtype="float32", device="cuda")
    tiny: dict[str, Any] = {"shape": small, "modes": ("forward", "forward_backward")}
    lam1: dict[str, Any] = {"options": FEATURES["lam1"], "check_error": True, "precision": "highest"}
    return [
        Case("quick-eta", options=FEATURES["eta"], implementations=(*TARGETED, "authors"), check_error=True, **tiny),
        Case("quick-lam1", implementations=("fused", "authors graphed"), **lam1, **tiny),
        Case("quick-recall", small, FEATURES["lam1"], ("fused graphed",), modes=("training_step",), kind="recall"),
    ]


def with_stepwise(case: Case) -> Case:
    """The case with the stepwise design of the fused kernels beside the one that is taken unasked."""
    ours = [name for name in case.implementations if implementation(name).kind == "fused"]
    stepwise = [name.replace("fused", "fused stepwise") for name in ours]
    return replace(case, implementations=(*case.implementations, *stepwise))
