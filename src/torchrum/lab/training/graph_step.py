"""The training step captured as a CUDA graph and replayed: small models are otherwise bound by kernel launches."""

from collections.abc import Callable, Hashable

import torch

from torchrum.lab.training.step import TrainStep, initial_state
from torchrum.ops.kernels.cuda import recording

WARM_UP = 3  # steps before recording; they are real ones, so that kernels are tuned and the optimizer has its state


def graph_obstacle(step: TrainStep) -> str | None:
    """Why a step cannot be recorded, in words; None if no restriction is known."""
    config, engine = step.config, step.engine
    if engine.device.type != "cuda":
        return "the run is on " + engine.device.type
    if engine.world_size > 1:
        return "several processes train together"
    if config.precision == "16-mixed":
        return "precision 16-mixed reads the loss scale on the host; bf16-mixed does not"
    if not config.task.capturable:
        return f"the batches of {type(config.task).__name__} differ in shape or need the host"
    if config.task.carries_state and initial_state(step.model) is None:
        return f"{type(config.task).__name__} carries state, and the model has no initial_state to reset it to"
    return None


class GraphStep:
    """Runs ``step`` eagerly three times, captures it, and replays the graph from then on; one graph for each shape.

    All that a step reads or changes keeps its place in memory: parameters, optimizer state, the learning rate (a
    tensor), the position in the data, the sums, the carried state, and the state of the data's generator, registered
    with the graph. The graphs share one pool of memory: a step leaves nothing in it that the next one needs.

    Args:
        step: what to capture; its optimizer must be capturable.
        report: called with the reason if capturing fails; the steps then run eagerly.
    """

    def __init__(self, step: TrainStep, report: Callable[[str], None]) -> None:
        self._step, self._report = step, report
        self._stream = torch.cuda.Stream(step.engine.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._met: set[Hashable] = set()
        """Shapes that ran eagerly, so that their kernels are compiled: that may not happen while capturing."""
        self._done = 0
        self._failed = False

    def run(self) -> None:
        """Do one step."""
        shape = self._step.shape
        if shape not in self._graphs and not self._failed and self._done >= WARM_UP and shape in self._met:
            self._capture(shape)
        if shape in self._graphs:
            self._graphs[shape].replay()
        else:
            self._eager()
            self._met.add(shape)
        self._done += 1

    def _eager(self) -> None:
        current = torch.cuda.current_stream(self._step.engine.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):  # the stream of the capture: autograd remembers where a weight was used
            self._step.run()
        current.wait_stream(self._stream)

    def _capture(self, shape: Hashable) -> None:
        step, device = self._step, self._step.engine.device
        generators = (step.generator, torch.cuda.default_generators[torch.cuda.current_device()])
        states = [generator.get_state() for generator in generators]
        current = torch.cuda.current_stream(device)
        step.optimizer.zero_grad(set_to_none=True)  # so that the gradients come to lie in the graph's own memory
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(step.generator)
        torch.cuda.synchronize(device)
        try:
            with recording(graph, self._pool, self._stream):
                step.run()
        except Exception as error:  # whatever a layer does that cannot be captured; nothing of the step was done
            self._failed = True
            torch.cuda.set_stream(current)  # a capture that breaks off does not leave its stream
            step.optimizer.zero_grad(set_to_none=True)
            for generator, state in zip(generators, states, strict=True):  # they still believe that they are recorded
                fresh = torch.Generator(device)
                fresh.set_state(state)
                generator.graphsafe_set_state(fresh.graphsafe_get_state())
            self._report(f"no CUDA graph, steps run one kernel at a time: {str(error).splitlines()[0]}")
        else:
            self._graphs[shape] = graph
