"""Training batches can be recorded in a CUDA graph, and replayed they go on through the stream."""

import pytest
import torch

from torchrum.lab.tasks import Copying, Recall
from torchrum.lab.tasks.base import Batch

TASKS = [Copying(delay=20), Recall(length=8, train_size=None), Recall(length=8, train_size=100)]


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_nothing_is_read_on_the_host(task):
    """On the meta device a value that is read on the host is an error; capture fails for the same reason."""
    data = task.setup(torch.device("cpu"), 0)
    step = torch.zeros((), dtype=torch.long, device="meta")
    if isinstance(data, Batch):
        batch = task.train_batch(4, torch.Generator(), step, data.to("meta"))
        assert batch.x.device.type == "meta"
    logits = torch.zeros(4, *task.batch(4, torch.Generator()).y.shape[1:], task.num_classes, device="meta")
    drawn = task.batch(4, torch.Generator()).to("meta")
    assert all(value.shape == () for value in (task.loss(logits, drawn), *task.metrics(logits, drawn).values()))


@pytest.mark.gpu
@pytest.mark.parametrize("task", TASKS, ids=str)
def test_captured_batches_equal_eager_ones(task):
    device = torch.device("cuda")
    data = task.setup(device, 0)

    def draw(generator: torch.Generator, step: torch.Tensor) -> list[torch.Tensor]:
        batch = task.train_batch(16, generator, step, data)
        return [batch.x, batch.y]

    eager, step = torch.Generator(device).manual_seed(5), torch.zeros((), dtype=torch.long, device=device)
    wanted = [draw(eager, step + i) for i in range(3)]

    recorded = torch.Generator(device).manual_seed(5)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        draw(torch.Generator(device), step)  # warm up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(recorded)
    with torch.cuda.graph(graph):
        x, y = draw(recorded, step)
    recorded.manual_seed(5)
    for want_x, want_y in wanted:
        graph.replay()
        assert torch.equal(x, want_x) and torch.equal(y, want_y)
        step += 1
