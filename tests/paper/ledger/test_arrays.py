import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from torchrum import RUM, rotation_matrix
from torchrum.cli import main
from torchrum.lab.recipes import load_recipe
from torchrum.lab.tasks import CharLM, Recall
from torchrum.lab.training import RunError, Trainer, load_model, override, read_metrics
from torchrum.paper.ledger import LedgerError, record
from torchrum.paper.ledger.arrays import WHOLE, _block, collect_arrays, drawable, phases, read_arrays, write_arrays
from torchrum.paper.ledger.entries import arrays_path
from torchrum.paper.plots.run import rotation_figure

RESULTS = Path(__file__).parents[3] / "results"
TINY = ["task.length=6", "task.train_size=none", "task.validation_size=8", "model.hidden_size=8", "device=cpu"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "recall"
    config = override(load_recipe("recall-rum-lam1-t30"), [*TINY, "batch_size=4", "steps=6", "eval_every=2"])
    Trainer(config, quiet=True).fit(folder)
    assert main(["eval", str(folder), "--device", "cpu"]) == 0
    return folder


def test_arrays_follow_the_trained_model(run):
    arrays = collect_arrays(run)
    model = load_model(run)
    x = next(iter(load_recipe("recall-rum-lam1-t30").task.__class__(length=6, validation_size=8).validation(0))).x[:1]
    assert arrays["symbols"].tolist() == x[0].tolist()
    output, _ = model.layer(torch.nn.functional.one_hot(x, model.num_inputs).float())
    np.testing.assert_allclose(arrays["layer.l0/norm"], output[0].norm(dim=-1).detach(), rtol=1e-5)
    assert arrays["layer.l0/theta"].shape == (9,)
    assert arrays["layer.l0/overlap"].shape == (9, 9)
    assert arrays["layer.l0/phases"].shape == (9, 4)
    # after the first step R is one rotation: its only angle is theta
    np.testing.assert_allclose(arrays["layer.l0/phases"][0], [0, 0, 0, arrays["layer.l0/theta"][0]], atol=2e-3)


def test_arrays_come_back_from_their_file(run, tmp_path):
    path = arrays_path(tmp_path, record(run, tmp_path, commit="abc1234", arrays=True))
    again = read_arrays(path)
    weight = load_model(run).layer.weight_hh_l0.detach().numpy()
    np.testing.assert_allclose(again["layer.l0/tau"], weight[:8], atol=abs(weight[:8]).max() / 254 + 1e-6)
    np.testing.assert_allclose(again["layer.l0/u"], weight[8:], atol=abs(weight[8:]).max() / 254 + 1e-6)
    np.testing.assert_allclose(again["layer.l0/overlap"].diagonal(), 1, atol=1e-2)
    assert write_arrays(tmp_path / "b.npz", collect_arrays(run)).read_bytes() == path.read_bytes()


def test_the_diagonal_is_followed_through_training(run):
    lines = read_metrics(run, "weights")
    assert [line["step"] for line in lines] == [2, 4, 6]
    arrays = collect_arrays(run)
    assert arrays["steps"].tolist() == [2, 4, 6]
    assert arrays["layer.l0/tau_dominance"].tolist() == pytest.approx(
        [line["layer.l0/tau_dominance"] for line in lines]
    )


def test_large_blocks_keep_a_corner_the_diagonal_and_a_map():
    H = WHOLE + 64
    matrix = torch.full((H, H), 0.1) + torch.eye(H)
    arrays = _block("tau", matrix)
    assert arrays["tau"].shape == (128, 128)
    assert arrays["tau_diagonal"].shape == (H,)
    tiles = arrays["tau_map"] * arrays["tau_map_unit"]
    assert tiles.shape == (64, 64)
    assert tiles[0, 1] == pytest.approx(0.1, rel=0.02)
    assert tiles[3, 3] == pytest.approx(((5 * 1.1**2 + 20 * 0.01) / 25) ** 0.5, rel=0.02)  # tiles are 5 by 5


@pytest.mark.parametrize("H", [6, 7])
def test_phases_are_the_angles_of_a_rotation(H):
    torch.manual_seed(0)
    axes = torch.linalg.qr(torch.randn(H, H, dtype=torch.float64)).Q.T
    R = torch.eye(H, dtype=torch.float64)
    for pair, angle in enumerate((0.3, 1.1, 2.9)):
        a, b = axes[2 * pair], axes[2 * pair + 1]
        R = R @ rotation_matrix(a, np.cos(angle) * a + np.sin(angle) * b)
    assert phases(R).tolist() == pytest.approx([0.3, 1.1, 2.9], abs=1e-6)


def test_models_without_a_rum_have_no_arrays(tmp_path):
    config = override(load_recipe("recall-lstm-t30"), [*TINY, "batch_size=4", "steps=2", "eval_every=2"])
    Trainer(config, quiet=True).fit(tmp_path / "run")
    assert collect_arrays(tmp_path / "run") == {}
    assert main(["eval", str(tmp_path / "run"), "--device", "cpu"]) == 0
    record(tmp_path / "run", tmp_path / "results", commit="abc1234", arrays=True)
    assert [path.name for path in (tmp_path / "results").glob("[!.]*")] == ["recall.jsonl"]


def test_a_lost_checkpoint_leaves_no_entry(run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(RunError, match="has no last checkpoint"):
        record(copy, tmp_path / "results", commit="abc1234", arrays=True)
    assert not (tmp_path / "results").exists()


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"not a zip file")
    with pytest.raises(LedgerError, match=r"a\.npz cannot be read.*torchrum record --arrays"):
        read_arrays(tmp_path / "a.npz")


def test_a_penn_treebank_sized_model_fits_in_100_kilobytes(tmp_path):
    torch.manual_seed(0)
    rum = RUM(4, 1000, form="paper")
    arrays = {}
    for number, block in enumerate(rum.weight_hh_l0.detach().chunk(2)):
        arrays |= _block("tau" if number == 0 else "u", block)
    path = write_arrays(tmp_path / "a.npz", arrays)
    assert path.stat().st_size < 60_000


def test_a_text_is_not_quoted(run, monkeypatch):
    """Penn Treebank may not be passed on, nor may a user's own text."""
    assert not CharLM.quotable
    monkeypatch.setattr(Recall, "quotable", False)
    arrays = collect_arrays(run)
    assert "symbols" not in arrays
    assert arrays["layer.l0/theta"].shape == (9,)
    rotation_figure(drawable(arrays), "text", load_recipe("recall-rum-lam1-t30").task)  # the axis counts steps


def test_no_committed_result_quotes_a_text():
    for path in RESULTS.glob("arrays/char-*.npz"):
        assert "symbols" not in read_arrays(path)
