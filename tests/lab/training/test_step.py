import math
import threading
from dataclasses import replace

import pytest
import torch

from lab.training.tiny import tiny, tiny_model
from torchrum.lab.models import build_model
from torchrum.lab.tasks.base import Batch
from torchrum.lab.training import ModelConfig, OptimizerConfig, Trainer
from torchrum.lab.training.errors import RunError
from torchrum.lab.training.step import copy_into, detached_copy, to_device


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
    cut = detached_copy(state)
    assert not cut[0].requires_grad
    assert cut[0].data_ptr() != state[0].data_ptr()
    assert cut[1][1] is None
    place = cut[0].data_ptr()
    assert copy_into(cut, (torch.full((2,), 7.0), (torch.ones(1), None))) is cut
    assert (cut[0].tolist(), cut[1][0].tolist(), cut[0].data_ptr()) == ([7, 7], [1], place)
    assert to_device(cut, torch.device("meta"))[1][0].is_meta


def test_a_run_in_another_thread_leaves_the_signals_alone(tmp_path):
    config, results = replace(tiny(), steps=2), []
    thread = threading.Thread(
        target=lambda: results.append(Trainer(config, tiny_model(config), quiet=True).fit(tmp_path / "run"))
    )
    thread.start()
    thread.join(60)
    assert results[0].stopped == "finished"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_clipping_drops_a_gradient_that_is_not_finite(tmp_path, value):
    """One bad entry in one step; without clipping the run stops with a clear error."""
    for clip in (1.0, None):
        config = replace(tiny(), steps=6, optimizer=OptimizerConfig(lr=1e-2, clip=clip))
        model, seen = tiny_model(config), []

        def spoil(grad, seen=seen):
            seen.append(1)
            return torch.full_like(grad, value) if len(seen) == 3 else grad

        next(model.parameters()).register_hook(spoil)
        trainer = Trainer(config, model, quiet=True)
        if clip is None:
            with pytest.raises(RunError, match="loss is nan"):
                trainer.fit(tmp_path / "plain")
        else:
            assert trainer.fit(tmp_path / "clipped").stopped == "finished"
            assert all(weight.isfinite().all() for weight in model.parameters())


def test_a_cell_is_told_the_step_before_it(tmp_path):
    """HM-LSTM's slope follows the steps, also those of a resumed run."""
    options = {"slope_per_step": 0.25, "max_slope": 3.0}
    config = replace(tiny(), steps=4, model=ModelConfig(layer="hm_lstm", hidden_size=4, options=options))
    model = build_model(config.model, config.task)
    (cell,) = model.layer.cells
    Trainer(config, model, quiet=True).fit(tmp_path / "run")
    assert cell.slope.item() == 1.75  # the last of four steps follows three
    cell.slope.fill_(9.0)
    Trainer(replace(config, steps=7), model, quiet=True).fit(tmp_path / "run", resume=True)
    assert cell.slope.item() == 2.5
