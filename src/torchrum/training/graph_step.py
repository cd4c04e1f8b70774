"""The training step recorded once as a CUDA graph and replayed: small models are otherwise bound by kernel launches."""

from collections.abc import Callable

import torch

from torchrum.ops._capture import recording
from torchrum.training.step import TrainStep

WARM_UP = 3  # steps before recording; they are real ones, so that kernels are tuned and the optimizer has its state


def graph_obstacle(step: TrainStep) -> str | None:
    """Why a step cannot be recorded, in words; None if nothing is known to stand against it."""
    config, engine = step.config, step.engine
    if engine.device.type != "cuda":
        return "the run is on " + engine.device.type
    if engine.world_size > 1:
        return "several processes train together"
    if config.precision == "16-mixed":
        return "precision 16-mixed reads the loss scale on the host; bf16-mixed does not"
    if not config.task.capturable:
        return f"the batches of {type(config.task).__name__} differ in shape or need the host"
    if config.task.carries_state:
        return f"{type(config.task).__name__} carries state from batch to batch"
    return None


class GraphStep:
    """Runs ``step`` eagerly three times, records it, and replays the record from then on.

    All that a step reads or changes keeps its place in memory: parameters, optimizer state, the learning rate (a
    tensor), the position in the data, the sums, and the state of the data's generator, registered with the graph.

    Args:
        step: what to record; its optimizer must be capturable.
        report: called with the reason if recording fails; the steps then run eagerly.
    """

    def __init__(self, step: TrainStep, report: Callable[[str], None]) -> None:
        self._step, self._report = step, report
        self._stream = torch.cuda.Stream(step.engine.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._done = 0
        self._failed = False

    def run(self) -> None:
        """Do one step."""
        if self._graph is None and not self._failed and self._done >= WARM_UP:
            self._record()
        if self._graph is not None:
            self._graph.replay()
        else:
            self._eager()
        self._done += 1

    def _eager(self) -> None:
        current = torch.cuda.current_stream(self._step.engine.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):  # the stream of the recording: autograd remembers where a weight was used
            self._step.run()
        current.wait_stream(self._stream)

    def _record(self) -> None:
        step, device = self._step, self._step.engine.device
        generators = (step.generator, torch.cuda.default_generators[torch.cuda.current_device()])
        states = [generator.get_state() for generator in generators]
        current = torch.cuda.current_stream(device)
        step.optimizer.zero_grad(set_to_none=True)  # so that the gradients come to lie in the graph's own memory
        graph = torch.cuda.CUDAGraph()
        graph.register_generator_state(step.generator)
        torch.cuda.synchronize(device)
        try:
            with recording(graph, stream=self._stream):
                step.run()
        except Exception as error:  # whatever a layer does that cannot be recorded; nothing of the step was done
            self._failed = True
            torch.cuda.set_stream(current)  # a recording that breaks off does not leave its stream
            step.optimizer.zero_grad(set_to_none=True)
            for generator, state in zip(generators, states, strict=True):  # they still believe that they are recorded
                fresh = torch.Generator(device)
                fresh.set_state(state)
                generator.graphsafe_set_state(fresh.graphsafe_get_state())
            self._report(f"no CUDA graph, steps run one kernel at a time: {str(error).splitlines()[0]}")
        else:
            self._graph = graph
