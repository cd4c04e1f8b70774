import json
import sys
from dataclasses import replace

import pytest
import torch

from texts import small_text
from torchrum import hub
from torchrum.cli import main
from torchrum.lab.recipes import load_recipe
from torchrum.lab.training import Trainer, load_model, override, read_config
from torchrum.paper.ledger import record

SMALL = "steps=4 eval_every=2 batch_size=4 task.lanes=4 task.segment=20 model.hidden_size=8 task.shown=0 device=cpu"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    (folder / "book.txt").write_bytes(small_text(2000))
    config = override(load_recipe("char-rum"), SMALL.split())
    Trainer(replace(config, task=config.task.reading(folder / "book.txt")), quiet=True).fit(folder / "run")
    assert main(["eval", str(folder / "run"), "--device", "cpu"]) == 0
    return folder / "run"


def test_a_card_is_filled_from_the_ledger(run, tmp_path):
    config = read_config(run)
    assert hub.find_entry(config, tmp_path / "nothing") is None
    assert "not in the results ledger" in hub.card_text(config, None)
    record(run, tmp_path, commit="abc1234", note="for a test")
    entry = hub.find_entry(config, tmp_path)
    card = hub.card_text(config, entry)
    assert card.startswith("---\nlibrary_name: torchrum\n")
    assert f"bpc {entry['test']['bpc']:.6g}" in card and "for a test" in card and entry["command"] in card
    assert str(run.parent) not in card
    assert hub.find_entry(replace(config, seed=5), tmp_path) is None


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    hub.trained_model.cache_clear()
    with pytest.raises(ImportError, match=r'pip install "torchrum\[hub\]"'):
        _ = hub.TrainedModel
    hub.trained_model.cache_clear()
    with pytest.raises(AttributeError, match="no attribute 'Trained'"):
        _ = hub.Trained


def test_a_model_goes_and_comes_back(run, tmp_path):
    pytest.importorskip("huggingface_hub", reason="the extra hub is not installed")
    model = hub.TrainedModel.from_run(run)
    record(run, tmp_path / "results", commit="abc1234")
    model.save_pretrained(tmp_path / "kept", model_card_kwargs={"results": tmp_path / "results"})
    assert str(run.parent) not in (tmp_path / "kept" / "config.json").read_text()
    assert "| commit | abc1234 |" in (tmp_path / "kept" / "README.md").read_text()
    back = hub.TrainedModel.from_pretrained(tmp_path / "kept")
    x = torch.randint(model.task.input_size, (2, 5))
    torch.testing.assert_close(back(x)[0], load_model(run)(x)[0])
    assert len(back.task.draw(back.model, length=10)) == 10


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("num_layers", 2, "Missing key"),
        ("hidden_size", 200_000, "parameters take .* GiB|allocate memory"),
        ("hidden_size", 7, "size"),
    ],
)
def test_a_description_that_is_not_that_of_the_weights_is_an_error(run, tmp_path, field, value, message):
    """Layers without weights would be random, and large ones would take all memory."""
    pytest.importorskip("huggingface_hub", reason="the extra hub is not installed")
    hub.TrainedModel.from_run(run).save_pretrained(tmp_path)
    kept = json.loads((tmp_path / "config.json").read_text())
    kept["description"]["model"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(kept))
    with pytest.raises((RuntimeError, ValueError), match=message):
        hub.TrainedModel.from_pretrained(tmp_path)
