import threading
from dataclasses import replace

import torch

from torchrum.tasks.base import Batch
from torchrum.training import Trainer
from torchrum.training.run_state import detach, to_device
from training.tiny import tiny, tiny_model


def test_a_batch_is_cut_and_moved_with_its_lengths():
    batch = Batch(torch.arange(12).view(4, 3), torch.arange(4), torch.tensor([3, 2, 1, 3]))
    part = batch.rows(1, 3)
    assert part.x.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert part.y.tolist() == [1, 2]
    assert part.lengths.tolist() == [2, 1]
    assert batch.to("meta").lengths.is_meta
    assert Batch(batch.x, batch.y).rows(0, 1).to("cpu").lengths is None


def test_carried_state_may_be_nested_and_partly_absent():
    state = (torch.ones(2, requires_grad=True) * 2, (torch.zeros(1), None))
    cut = detach(state)
    assert not cut[0].requires_grad
    assert cut[1][1] is None
    assert to_device(cut, torch.device("meta"))[1][0].is_meta


def test_a_run_in_another_thread_leaves_the_signals_alone(tmp_path):
    config, results = replace(tiny(), steps=2), []
    thread = threading.Thread(
        target=lambda: results.append(Trainer(config, tiny_model(config), quiet=True).fit(tmp_path / "run"))
    )
    thread.start()
    thread.join(60)
    assert results[0].stopped == "finished"
