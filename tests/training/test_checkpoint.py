import errno
import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchrum.training import RunError, Trainer
from torchrum.training import checkpoint as checkpoints
from torchrum.training.checkpoint import load_checkpoint, save_checkpoint
from training.processes import limit_files, start, train_as_nobody
from training.tiny import tiny, tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "run"
    config = replace(tiny(), steps=16)
    Trainer(config, quiet=True).fit(folder)
    return folder


@pytest.fixture
def run(source, tmp_path):
    shutil.copytree(source, tmp_path / "run")
    return tmp_path / "run"


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def resume(folder, **changes):
    config = replace(tiny(), steps=32, **changes)
    return Trainer(config, quiet=True).fit(folder, resume=True)


def last(folder):
    return folder / "checkpoints" / json.loads((folder / "checkpoints" / "index.json").read_text())["last"]


class Trap:
    """What an attacker would put into a pickle."""

    def __reduce__(self):
        return os.mkdir, ("/tmp/torchrum-trap",)


def pickled_code():
    buffer = io.BytesIO()
    torch.save({"progress": Trap()}, buffer)
    return buffer.getvalue()


def cut(folder, name):
    path = last(folder) / name
    path.write_bytes(path.read_bytes()[:-10])


def flip(folder, name):
    path = last(folder) / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def replace_content(folder, name, content):
    (last(folder) / name).write_bytes(content)
    manifest = json.loads((last(folder) / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": len(content), "sha256": checkpoints._digest(content)}
    (last(folder) / "manifest.json").write_text(json.dumps(manifest))


DAMAGE = {
    "cut weights": (lambda run: cut(run, "model.safetensors"), "is damaged: it has"),
    "cut state": (lambda run: cut(run, "state.pt"), "is damaged: it has"),
    "cut manifest": (lambda run: cut(run, "manifest.json"), r"manifest.json cannot be read"),
    "one bit": (lambda run: flip(run, "state.pt"), "its content has changed"),
    "no weights": (lambda run: (last(run) / "model.safetensors").unlink(), "cannot be read: No such file"),
    "no checkpoint": (lambda run: shutil.rmtree(last(run)), "which is not there"),
    "foreign manifest": (lambda run: (last(run) / "manifest.json").write_text("{}"), "is not a torchrum checkpoint"),
    "foreign index": (lambda run: (run / "checkpoints/index.json").write_text("[]"), "is not an index"),
    "foreign weights": (lambda run: replace_content(run, "model.safetensors", b"hello"), "not a torchrum checkpoint"),
    "pickled code": (lambda run: replace_content(run, "state.pt", pickled_code()), "not a torchrum checkpoint"),
    "path outside": (
        lambda run: (run / "checkpoints/index.json").write_text(
            json.dumps({"format": checkpoints.FORMAT, "last": "../..", "best": None})
        ),
        "which is not there",
    ),
    "no config": (lambda run: (run / "config.json").unlink(), "is not a run folder"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_or_foreign_run_is_refused_and_left_alone(run, damage):
    spoil, message = DAMAGE[damage]
    spoil(run)
    before = files(run)
    with pytest.raises(RunError, match=message):
        resume(run)
    assert files(run) == before
    assert not Path("/tmp/torchrum-trap").exists()


def test_a_checkpoint_of_another_run_is_refused(run, tmp_path):
    other = replace(tiny(), steps=16, seed=5)
    Trainer(other, quiet=True).fit(tmp_path / "other")
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", run / "checkpoints")
    before = files(run)
    with pytest.raises(RunError, match="belongs to another run: seed 5 -> 0"):
        resume(run)
    assert files(run) == before


def test_weights_that_do_not_fit_are_refused(run):
    config = replace(tiny(), steps=32)
    model = tiny_model(replace(config, model=replace(config.model, hidden_size=4)))
    before = files(run)
    with pytest.raises(RunError, match=r"does not fit the model: layer\.bias_hh_l0 is"):
        Trainer(config, model, quiet=True).fit(run, resume=True)
    assert files(run) == before


def test_a_full_disk_while_saving_keeps_the_earlier_checkpoint(run, monkeypatch):
    before = files(run / "checkpoints")
    written = []

    def full(path, content):
        written.append(path)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        path.write_bytes(content)

    monkeypatch.setattr(checkpoints, "_write", full)
    with pytest.raises(RunError, match=r"cannot be written: No space left on device.*--resume"):
        resume(run)
    assert files(run / "checkpoints") == before
    monkeypatch.undo()
    assert resume(run).step == 32


def test_a_full_disk_on_the_command_line(run):
    before = files(run / "checkpoints")
    size = (last(run) / "state.pt").stat().st_size
    (run / "curve.png").unlink(missing_ok=True)
    assert max(len(content) for path, content in files(run).items() if path.name != "state.pt") < size // 2
    done = subprocess.run(
        [sys.executable, "-m", "torchrum", "train", "training.tiny:tiny", "--resume", str(run), "--steps", "32"],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        preexec_fn=limit_files(size // 2),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    assert "cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert files(run / "checkpoints") == before


def test_a_folder_that_cannot_be_written(run, tmp_path):
    for parent in (tmp_path, *tmp_path.parents[:3]):
        parent.chmod(0o755)
    (tmp_path / "locked").mkdir(mode=0o555)
    before = files(run)
    for folder in (tmp_path / "locked" / "new", run):
        run.chmod(0o555)
        process = start(train_as_nobody, folder, 32)
        process.join(60)
        assert process.exitcode == 3
    run.chmod(0o755)
    assert files(run) == before
    assert not list((tmp_path / "locked").iterdir())


def test_only_last_and_best_are_kept_and_read(tmp_path):
    for step, best in ((1, True), (2, False), (3, True), (4, False), (5, False)):
        save_checkpoint(tmp_path, step, {"w": torch.full((2,), float(step))}, {"step": step}, best)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        *("index.json", "step-00000003", "step-00000005")
    }
    assert load_checkpoint(tmp_path)[1] == {"step": 5}
    assert load_checkpoint(tmp_path, "best")[0]["w"].tolist() == [3.0, 3.0]
    save_checkpoint(tmp_path, 5, {"w": torch.zeros(2)}, {"step": 5}, True)  # the same step has proved to be the best
    assert load_checkpoint(tmp_path, "best")[0]["w"].tolist() == [5.0, 5.0]


def test_complex_and_shared_weights_are_kept(tmp_path):
    weight = torch.randn(3, dtype=torch.complex64)
    save_checkpoint(tmp_path, 1, {"a": weight, "b": weight, "t": torch.randn(2, 3).T}, {}, False)
    weights, _ = load_checkpoint(tmp_path)
    assert torch.equal(weights["a"], weight)
    assert torch.equal(weights["b"], weight)
    assert weights["t"].shape == (3, 2)
    with pytest.raises(RunError, match="has no best checkpoint"):
        load_checkpoint(tmp_path, "best")
