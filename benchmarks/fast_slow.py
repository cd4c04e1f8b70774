"""Time a Penn Treebank update of FS-RUM-2: two LN-LSTMs of 700, a RUM of 1000, B=128, T=150. Needs a CUDA device.

    python benchmarks/fast_slow.py                   the update: forward, forward + backward, whole; then the errors
    python benchmarks/fast_slow.py --slow lstm       FS-LSTM-2 with a slow LSTM of 400
    python benchmarks/fast_slow.py --plain           beside it the plain loop, eager
    python benchmarks/fast_slow.py --pieces          what each matmul and row kernel costs by itself
    python benchmarks/fast_slow.py --sweep           split-K and dependent launch, forward and backward
    python benchmarks/fast_slow.py --lstm 1000       an LN-LSTM by itself beside cuDNN's LSTM without layer norm

tests/ops/test_fast_slow_scan.py must be green first. An update is embedding 128, dropout .35 at four places, zoneout
.1 (h) and .5 (c), softmax 50, loss summed over time, clip 1.0, Adam 2e-3; matmuls in bfloat16, master weights
and their gradients in float32, states carried over. "captured" is the whole update in one CUDA graph, "own graphs" the
same called as usual. Times are medians in milliseconds.
"""

import argparse
import itertools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchrum.cells.fast_slow import FastSlowCell, fast_slow
from torchrum.cells.lstm import LSTMCell
from torchrum.ops.fast_slow_scan import FastSlowInputs
from torchrum.ops.fast_slow_scan.fused import fast_slow_plans, fast_slow_scan_fused
from torchrum.ops.fast_slow_scan.reference import fast_slow_scan_reference
from torchrum.ops.kernels import matmul, triton_launch
from torchrum.ops.kernels.chain import BackwardChain, Chain, ChainInputs, ForwardChain, cell_grads, chain_forward
from torchrum.ops.kernels.linear import CellWeights
from torchrum.ops.kernels.masks import CELL_STREAMS, stream_seeds
from torchrum.ops.kernels.triton_launch import clear_graphs
from torchrum.paper.bench.measure import Captured, time_cuda

VOCABULARY, EMBEDDING = 50, 128
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def milliseconds(run: Callable[[], object]) -> float:
    """Measure the median time of one call on the GPU."""
    return time_cuda({"run": run}, samples=15, warmups=3)["run"].median


def microseconds(run: Callable[[], object]) -> float:
    """Measure the same in microseconds."""
    return 1e3 * milliseconds(run)


def make_cell(slow: str, backend: str = "auto") -> FastSlowCell:
    words = {"slow_size": 1000, "eta": 1.0} if slow == "rum" else {"slow_size": 400}
    randomness = {"cell_dropout": 0.35, "zoneout": 0.1, "zoneout_cell": 0.5}
    cell = fast_slow(EMBEDDING, 700, slow=slow, device="cuda", backend=backend, **words, **randomness)  # type: ignore[arg-type]
    assert isinstance(cell, FastSlowCell)
    return cell


class Update:
    """A language model of one Fast-Slow layer and its training step on fixed random text."""

    def __init__(self, cell: FastSlowCell, T: int, B: int, dtype: torch.dtype) -> None:
        self.cell, self.dtype, self.B = cell, dtype, B
        self.embed = nn.Embedding(VOCABULARY, EMBEDDING, device="cuda")
        self.readout = nn.Linear(cell.hidden_size, VOCABULARY, device="cuda")
        parameters = [*cell.parameters(), *self.embed.parameters(), *self.readout.parameters()]
        self.parameters = parameters
        self.adam = torch.optim.Adam(parameters, lr=2e-3, fused=True, capturable=True)
        self.text = torch.randint(VOCABULARY, (T + 1, B), device="cuda")
        self.state = cell.initial_state(B, device=torch.device("cuda"), dtype=torch.float32)

    def forward(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        with torch.autocast("cuda", self.dtype, enabled=self.dtype != torch.float32, cache_enabled=False):
            output, state = self.cell.scan(self.embed(self.text[:-1]), self.state)
            logits = self.readout(output)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), self.text[1:].flatten(), reduction="sum") / self.B
        return loss, state

    def carry(self, state: tuple[Tensor, ...]) -> None:
        for mine, new in zip(self.state, state, strict=True):
            mine.copy_(new.detach())

    def no_grad(self) -> None:
        with torch.no_grad():
            self.carry(self.forward()[1])

    def both(self) -> None:
        self.adam.zero_grad(set_to_none=True)
        loss, state = self.forward()
        loss.backward()
        self.carry(state)  # after the backward, which still reads the old one

    def whole(self) -> None:
        self.both()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.adam.step()


def report(words: str, update: Update, T: int, capture: bool) -> None:
    wrap = Captured if capture else lambda run: run
    forward, both, whole = (milliseconds(wrap(run)) for run in (update.no_grad, update.both, update.whole))
    numbers = (forward, both - forward, whole, forward * 1e3 / T, (both - forward) * 1e3 / T, whole * 1e3 / T)
    print(f"{words:12}" + "".join(f"{number:10.2f}" for number in numbers), flush=True)


HEADER = "            " + "".join(
    f"{word:>10}" for word in ("fwd ms", "bwd ms", "update ms", "fwd us/t", "bwd us/t", "upd us/t")
)


def errors(cell: FastSlowCell, T: int, B: int, dtype: torch.dtype, training: bool) -> None:
    """Largest relative errors of outputs, states and gradients against the plain loop in float64, masks fixed."""
    cell.train(training)
    x = torch.randn(T, B, EMBEDDING, device="cuda")
    with torch.no_grad():
        state = cell.initial_state(B, device=torch.device("cuda"), dtype=torch.float32)
        _, fast, slow, weights, *_ = cell.scan_inputs(x, state)
        options, xp = cell.scan_options(), cell.fast[0].project(x).to(dtype)
        rounded = [cell_weights._replace(**round_weights(cell_weights, dtype)) for cell_weights in weights]
    seed = torch.tensor(12345, device="cuda") if options.draws else None
    grad = torch.randn(T, B, cell.hidden_size, device="cuda").to(dtype)

    def gradients(scan, exact: bool) -> list[Tensor]:
        def leaf(part: Tensor) -> Tensor:
            return (part.double() if exact else part).detach().requires_grad_()

        def leaves(part: CellWeights) -> CellWeights:
            return part._replace(**{name: leaf(p) for name, p in part._asdict().items() if p is not None})

        copies = [leaves(part) for part in rounded]
        inputs = FastSlowInputs(leaf(xp), tuple(map(leaf, fast)), tuple(map(leaf, slow)), copies, seed)
        out, fast_n, slow_n = scan(inputs, options)
        wanted = [inputs.xp, *inputs.fast, *inputs.slow, *(p for part in copies for p in part if p is not None)]
        found = torch.autograd.grad(out, wanted, grad.to(out.dtype))
        return [out.detach(), *(p.detach() for p in (*fast_n, *slow_n)), *found]

    found, wanted = gradients(fast_slow_scan_fused, False), gradients(fast_slow_scan_reference, True)
    relative = [
        ((a.double() - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in zip(found, wanted, strict=True)
    ]
    states = 1 + len(fast) + len(slow)
    print(
        f"errors against float64, {dtype}, {'fixed masks' if training else 'no randomness'}: "
        f"outputs and states {max(relative[:states]):.1e}, gradients {max(relative[states:]):.1e}",
        flush=True,
    )


def round_weights(weights, dtype: torch.dtype) -> dict[str, Tensor]:
    """Matrices in the matmul's dtype, as a scan under autocast gets them."""
    return {
        name: getattr(weights, name).to(dtype)
        for name in ("weight_ih", "weight_hh")
        if getattr(weights, name) is not None
    }


@torch.no_grad()
def pieces(cell: FastSlowCell, T: int, B: int, dtype: torch.dtype) -> None:
    """Each cell's matmul and row kernel, chained in one graph; microseconds."""
    length = 64
    x = torch.randn(T, B, EMBEDDING, device="cuda")
    state = cell.initial_state(B, device=torch.device("cuda"), dtype=torch.float32)
    (_, fast, slow, weights, *_), options = cell.scan_inputs(x, state), cell.scan_options()
    seeds = stream_seeds(torch.tensor(1, device="cuda"), CELL_STREAMS * len(weights))
    inputs = ChainInputs(cell.fast[0].project(x).to(dtype), (*fast, *slow), weights, seeds)
    plans = fast_slow_plans(fast[0].shape[1], slow[0].shape[1], options)
    out, _, saved = chain_forward(plans, inputs)
    dgates = [torch.empty_like(kept.gates) for kept in saved]
    forward, backward = ForwardChain(plans, inputs, graphed=False), BackwardChain(plans, inputs, graphed=False)
    scans: list[tuple[str, Chain]] = [("forward", forward), ("backward", backward)]
    forward.begin(inputs, saved, out)
    backward.begin(inputs, saved, [torch.randn_like(out), *[None] * len(inputs.states)], dgates)
    for direction, scan in scans:
        names = ["F1", "S", *(f"F{number}" for number in range(2, len(options.fast) + 1))]
        for name, stage in zip(names if direction == "forward" else names[::-1], scan.stages, strict=True):

            def matmuls(stage=stage) -> None:
                for _ in range(length):
                    stage.matmul.prepare()()

            def rows(stage=stage, T=T) -> None:
                for t in range(length):
                    stage.row(None, None, t, T)()

            one, other = (microseconds(Captured(run)) / length for run in (matmuls, rows))
            shapes = f"{tuple(stage.matmul.left.shape)} x {tuple(stage.matmul.right.shape)}"
            words = f"{direction:8} {name:3} matmul {shapes} in {stage.matmul.parts} parts"
            print(f"{words} {one:6.2f}   row {other:6.2f} us", flush=True)

        def steps(scan: Chain = scan) -> None:
            for t in range(length):
                for launch in scan.launches(t):
                    launch()

        print(f"{direction:8} whole step {microseconds(Captured(steps)) / length:6.2f} us", flush=True)

    def weight_grads() -> None:
        for weight, plan, dgate, kept in zip(weights, plans, dgates, saved, strict=True):
            cell_grads(weight, plan, dgate, kept.inputs[:T], None)

    print(f"weight gradients after the loop {milliseconds(weight_grads):6.3f} ms")
    norms = milliseconds(lambda: [stage.norm_grads() for stage in backward.stages])
    print(f"gradients of layer norm after the loop {norms:6.3f} ms")


def lstm(N: int, T: int, B: int, dtype: torch.dtype) -> None:
    """Forward + backward of one layer with N inputs, captured whole; microseconds per step."""
    ours = LSTMCell(N, N, layer_norm=True, zoneout=0.1, zoneout_cell=0.5, init="orthogonal", device="cuda", dtype=dtype)
    cudnn = nn.LSTM(N, N, device="cuda", dtype=dtype)
    x = torch.randn(T, B, N, device="cuda").to(dtype).requires_grad_()
    grad = torch.randn(T, B, N, device="cuda").to(dtype)
    state = ours.initial_state(B, device=torch.device("cuda"), dtype=dtype)
    print(f"N={N}: {ours.explain_backend(x)}")

    def both(layer: nn.Module, run: Callable[[], Tensor]) -> Callable[[], None]:
        def step() -> None:
            layer.zero_grad(set_to_none=True)
            x.grad = None
            run().backward(grad)

        return step

    runs = {"LN-LSTM fused": both(ours, lambda: ours.scan(x, state)[0]), "cuDNN LSTM": both(cudnn, lambda: cudnn(x)[0])}
    for name, run in runs.items():
        print(f"{name:14} {microseconds(Captured(run)) / T:8.2f} us per step", flush=True)


def sweep(slow: str, T: int, B: int, dtype: torch.dtype) -> None:
    for forward, backward, pdl in itertools.product((False, True), repeat=3):
        set_tuning(forward, backward, pdl)
        clear_graphs()
        report(f"{forward!s:5} {backward!s:5} {pdl!s:5}", Update(make_cell(slow), T, B, dtype), T, capture=True)


def set_tuning(forward: bool | None, backward: bool | None, pdl: bool) -> None:
    if forward is not None:
        matmul.SPLIT_K["forward"] = forward
    if backward is not None:
        matmul.SPLIT_K["backward"] = backward
    triton_launch.PDL = pdl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--T", type=int, default=150)
    parser.add_argument("--B", type=int, default=128)
    parser.add_argument("--slow", choices=("rum", "lstm"), default="rum")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--pieces", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--lstm", type=int)
    parser.add_argument("--no-errors", action="store_true")
    parser.add_argument("--split-forward", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--split-backward", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--pdl", action=argparse.BooleanOptionalAction, default=triton_launch.PDL)
    args = parser.parse_args()
    torch.manual_seed(0)
    dtype = DTYPES[args.dtype]
    set_tuning(args.split_forward, args.split_backward, args.pdl)
    print(f"FS-{args.slow.upper()}-2, T={args.T} B={args.B} {dtype}, split {matmul.SPLIT_K}, PDL {triton_launch.PDL}")
    if args.lstm:
        lstm(args.lstm, args.T, args.B, dtype)
        return
    if args.pieces:
        pieces(make_cell(args.slow), args.T, args.B, dtype)
        return
    print(HEADER)
    if args.sweep:
        print("split forward, split backward, PDL")
        sweep(args.slow, args.T, args.B, dtype)
        return
    update = Update(make_cell(args.slow), args.T, args.B, dtype)
    begin = time.perf_counter()
    update.whole()
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    report("captured", update, args.T, capture=True)
    report("own graphs", update, args.T, capture=False)
    print(f"first call {first:.1f} s, peak memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    if args.plain:
        report("plain loop", Update(make_cell(args.slow, "reference"), args.T, args.B, dtype), args.T, capture=False)
    if not args.no_errors:
        clear_graphs()
        for kind, training in itertools.product(dict.fromkeys((dtype, torch.float32)), (False, True)):
            torch.set_float32_matmul_precision("highest")
            errors(make_cell(args.slow), args.T, args.B, kind, training)


if __name__ == "__main__":
    main()
