import errno
import io
import json
import os
import shutil
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.training.processes import run_command, start, train_as_nobody
from lab.training.tiny import tiny, tiny_model
from torchrum.lab.training import RunError, Trainer
from torchrum.lab.training import checkpoint as checkpoints
from torchrum.lab.training.checkpoint import load_checkpoint, unpack, write_checkpoint
from torchrum.lab.training.config import CHANGEABLE, to_json, without
from torchrum.lab.training.errors import DivergedError

ROOT = Path(__file__).parents[3]


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


def save(folder, step, best=False):
    write_checkpoint(folder, step, {"w": torch.full((2,), float(step))}, {"step": step}, best)


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


def replace_state(run, state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    replace_content(run, "state.pt", buffer.getvalue())


DAMAGE = {
    "cut weights": (lambda run: cut(run, "model.safetensors"), "its content has changed"),
    "cut state": (lambda run: cut(run, "state.pt"), "its content has changed"),
    "cut manifest": (lambda run: cut(run, "manifest.json"), r"manifest.json cannot be read"),
    "one bit": (lambda run: flip(run, "state.pt"), "its content has changed"),
    "no weights": (lambda run: (last(run) / "model.safetensors").unlink(), "cannot be read: No such file"),
    "no checkpoint": (lambda run: shutil.rmtree(last(run)), "which is not there"),
    "foreign manifest": (
        lambda run: (last(run) / "manifest.json").write_text("{}"),
        "not that of a torchrum",
    ),
    "foreign index": (
        lambda run: (run / "checkpoints/index.json").write_text("[]"),
        "not that of a torchrum",
    ),
    "foreign weights": (lambda run: replace_content(run, "model.safetensors", b"hello"), "not a torchrum checkpoint"),
    "pickled code": (lambda run: replace_content(run, "state.pt", pickled_code()), "not a torchrum checkpoint"),
    "path outside": (
        lambda run: (run / "checkpoints/index.json").write_text(
            json.dumps({"format": checkpoints.FORMAT, "last": "../..", "best": None})
        ),
        r"index.json: '../..' is not the name of a checkpoint",
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
    with pytest.raises(RunError, match=r"does not fit the model: .*size mismatch for layer\.weight_ih_l0"):
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

    monkeypatch.setattr(checkpoints, "write_synced", full)
    with pytest.raises(RunError, match=r"cannot be written: No space left on device.*--resume"):
        resume(run)
    assert files(run / "checkpoints") == before
    monkeypatch.undo()
    assert resume(run).step == 32


def test_a_full_disk_on_the_command_line(run, tmp_path):
    before = files(run / "checkpoints")
    size = (last(run) / "state.pt").stat().st_size
    (run / "curve.png").unlink(missing_ok=True)
    assert max(len(content) for path, content in files(run).items() if path.name != "state.pt") < size // 2
    errors = tmp_path / "errors"
    errors.touch()
    arguments = ["train", "lab.training.tiny:tiny", "--resume", str(run), "--steps", "32"]
    process = start(run_command, arguments, str(errors), False, size // 2)
    process.join(60)
    assert process.exitcode == 1, errors.read_text()
    assert "cannot be written: File too large" in errors.read_text()
    assert "Traceback" not in errors.read_text()
    assert files(run / "checkpoints") == before


@pytest.fixture
def open_path():
    """A folder that nobody can reach; pytest closes the way to its own to others whenever a session begins."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_a_folder_that_cannot_be_written(source, open_path):
    run, locked = shutil.copytree(source, open_path / "run"), open_path / "locked"
    locked.mkdir(mode=0o555)
    before = files(run)
    for folder in (locked / "new", run):
        run.chmod(0o555)
        process = start(train_as_nobody, folder, 32)
        process.join(60)
        assert process.exitcode == 3
    run.chmod(0o755)
    assert files(run) == before
    assert not list(locked.iterdir())


def test_only_last_and_best_are_kept_and_read(tmp_path):
    for step, best in ((1, True), (2, False), (3, True), (4, False), (5, False)):
        save(tmp_path, step, best)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        *("index.json", "step-00000003", "step-00000005")
    }
    assert load_checkpoint(tmp_path)[1] == {"step": 5}
    assert load_checkpoint(tmp_path, "best")[0]["w"].tolist() == [3.0, 3.0]
    # the same step has proved to be the best
    write_checkpoint(tmp_path, 5, {"w": torch.zeros(2)}, {"step": 5}, True)
    assert load_checkpoint(tmp_path, "best")[0]["w"].tolist() == [5.0, 5.0]


def test_complex_and_shared_weights_are_kept(tmp_path):
    weight = torch.randn(3, dtype=torch.complex64)
    write_checkpoint(tmp_path, 1, {"a": weight, "b": weight, "t": torch.randn(2, 3).T}, {}, False)
    weights, _ = load_checkpoint(tmp_path)
    assert torch.equal(weights["a"], weight)
    assert torch.equal(weights["b"], weight)
    assert weights["t"].shape == (3, 2)
    with pytest.raises(RunError, match=r"has no best checkpoint yet.* torchrum train --resume"):
        load_checkpoint(tmp_path, "best")


def names(folder):
    return {path.name for path in (folder / "checkpoints").iterdir()}


def test_saving_removes_nothing_that_the_run_did_not_write(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    run.mkdir()
    other.mkdir()
    save(other, 7)
    save(run, 1)
    root = run / "checkpoints"
    shutil.copytree(root / "step-00000001", root / "mine")
    shutil.copytree(other / "checkpoints" / "step-00000007", root / "step-00000005")
    before = files(root / "step-00000005")
    (root / "step-00000003").symlink_to(other / "checkpoints", target_is_directory=True)
    (root / "step-00000009").mkdir()
    for step in range(2, 10):
        save(run, step)
    assert load_checkpoint(run)[1] == {"step": 9}
    assert load_checkpoint(other)[1] == {"step": 7}
    moved = {"step-00000003.other-1", "step-00000005.other-1", "step-00000009.other-1"}
    assert names(run) == {"index.json", "step-00000009", "mine", *moved}
    assert (root / "step-00000003.other-1").readlink() == other / "checkpoints"
    assert files(root / "step-00000005.other-1") == before


def test_a_known_step_that_became_a_link_is_not_followed(tmp_path):
    run, kept = tmp_path / "run", tmp_path / "kept"
    run.mkdir()
    save(run, 1)
    (run / "checkpoints" / "step-00000001").rename(kept)  # a user makes room on another disk
    (run / "checkpoints" / "step-00000001").symlink_to(kept)
    before = files(kept)
    save(run, 2)
    save(run, 3)
    assert files(kept) == before
    assert names(run) == {"index.json", "step-00000003"}


def test_checkpoints_that_are_a_link_are_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunError, match="is a symbolic link, which is never followed"):
        save(tmp_path / "run", 1)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_temporary_name_that_is_a_link_is_not_written_through(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("safe")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".index.json.tmp").symlink_to(victim)
    (tmp_path / "checkpoints" / ".step-00000001.tmp").symlink_to(tmp_path)
    save(tmp_path, 1)
    assert victim.read_text() == "safe"
    assert load_checkpoint(tmp_path)[1] == {"step": 1}


def test_without_the_index_the_newest_intact_checkpoint_is_found(tmp_path):
    save(tmp_path, 1, best=True)
    save(tmp_path, 2)
    root = tmp_path / "checkpoints"
    (root / "step-00000004").mkdir()
    (root / "index.json").unlink()
    assert checkpoints.has_checkpoint(tmp_path)
    assert load_checkpoint(tmp_path)[1] == {"step": 2}
    assert load_checkpoint(tmp_path, "best")[1] == {"step": 1}
    save(tmp_path, 5)
    assert names(tmp_path) == {"index.json", *(f"step-0000000{step}" for step in (1, 4, 5))}
    assert load_checkpoint(tmp_path, "best")[1] == {"step": 1}


def test_a_run_without_its_index_is_resumed_and_loses_nothing(run):
    (run / "checkpoints" / "index.json").unlink()
    assert resume(run).step == 32
    assert json.loads((run / "environment.json").read_text())["resumed"][0]["step"] == 16


def test_an_index_and_manifests_from_before_are_read(run):
    index = json.loads((run / "checkpoints" / "index.json").read_text())
    old = {name: index[name] for name in ("format", "last", "best")}
    (run / "checkpoints" / "index.json").write_text(json.dumps(old))
    for path in (run / "checkpoints").glob("*/manifest.json"):
        manifest = json.loads(path.read_text())
        path.write_text(json.dumps({name: manifest[name] for name in ("format", "step", "files")}))
    assert resume(run).step == 32
    index = json.loads((run / "checkpoints" / "index.json").read_text())
    assert names(run) == {"index.json", index["last"], index["best"]}


def test_names_are_on_the_disk_before_and_after_the_index(tmp_path, monkeypatch):
    """The checkpoint's files, its folder, the rename, the index and its rename: each synced before the next."""
    order = []
    for name in ("fsync", "rename", "replace"):
        real = getattr(os, name)

        def noted(*arguments, name=name, real=real):
            path = Path(f"/proc/self/fd/{arguments[0]}").readlink() if name == "fsync" else Path(arguments[1])
            order.append((name, path.name.lstrip(".").removesuffix(".tmp")))
            return real(*arguments)

        monkeypatch.setattr(os, name, noted)
    (tmp_path / "checkpoints").mkdir()
    save(tmp_path, 1)
    step = "step-00000001"
    assert order == [
        *[("fsync", "model.safetensors"), ("fsync", "state.pt")],
        *[("fsync", "manifest.json"), ("replace", "manifest.json"), ("fsync", step)],
        *[("rename", step), ("fsync", "checkpoints")],
        *[("fsync", "index.json"), ("replace", "index.json"), ("fsync", "checkpoints")],
    ]


def test_metrics_with_missing_lines_are_noticed_by_resume(run):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:1] + lines[2:]))
    before = files(run)
    with pytest.raises(RunError, match=r"metrics.jsonl is not as the run wrote it: lines are missing"):
        resume(run)
    assert files(run) == before
    path.unlink()
    with pytest.raises(RunError, match="lines are missing"):
        resume(run)


def test_lines_behind_the_checkpoint_are_written_anew(run):
    path = run / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "train", "step": 17, "loss": 1.0, "seco')
    assert resume(run).step == 32
    assert path.read_bytes().startswith(whole)
    assert b'"step": 17' not in path.read_bytes()


def test_a_checkpoint_from_before_the_mark_is_resumed(run):
    """Its state holds less: no mark of the metrics, and of the config only what makes the run what it is."""
    state = torch.load(last(run) / "state.pt", weights_only=True)
    del state["metrics"]
    config = replace(tiny(), steps=16)
    replace_state(run, {**state, "config": without(CHANGEABLE, to_json(config), config.task)})
    lines = (run / "metrics.jsonl").read_text()
    assert resume(run).step == 32
    assert (run / "metrics.jsonl").read_text().startswith(lines)


def test_a_checkpoint_that_is_replaced_while_it_is_read(tmp_path, monkeypatch):
    """Somebody scores a run that is going on: what was removed meanwhile has made way for a newer one."""

    save(tmp_path, 1, best=True)
    real, steps = checkpoints._read, iter((2, 3))

    def read(folder):
        if (step := next(steps, None)) is not None:
            save(tmp_path, step, best=True)
        return real(folder)

    monkeypatch.setattr(checkpoints, "_read", read)
    assert load_checkpoint(tmp_path)[1] == {"step": 3}


def packed(data) -> bytes:
    buffer = io.BytesIO()
    torch.save(data, buffer)
    return buffer.getvalue()


def deflated(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return buffer.getvalue()


def laughs():
    data = ["ha"]
    for _ in range(25):
        data = [data, data]
    return data


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "BadZipFile"),
        (packed({})[:-30], "BadZipFile"),
        (deflated(packed(torch.zeros(10**6))), "its archive is compressed"),
        (packed(laughs()), "more lists or numbers than its file can hold"),
        (packed(torch.zeros(1).expand(10**9)), "more lists or numbers than its file can hold"),
        (packed({"a": print}), "UnpicklingError: Weights only load failed"),
    ],
)
def test_a_pickle_that_could_do_harm_is_refused(content, message):
    with pytest.raises(ValueError, match=message) as failure:
        unpack(content)
    assert "\n" not in str(failure.value)


def kept(run) -> tuple[str | None, str | None]:
    index = json.loads((run / "checkpoints" / "index.json").read_text())
    return index["last"], index["best"]


def test_a_run_that_breaks_off_keeps_its_best_model(tmp_path):
    """A loss that is no longer finite ends the run between two checkpoints."""
    config = replace(tiny(), steps=40, log_every=2, eval_every=2, checkpoint_every=1000)

    class Breaking(type(tiny_model(config))):
        calls = 0

        def forward(self, x, lengths=None):
            self.calls += self.training
            return super().forward(x, lengths) * (torch.nan if self.calls > 20 else 1)

    with pytest.raises(DivergedError, match="the loss is nan at step 22"):
        Trainer(config, Breaking(config.task), quiet=True).fit(tmp_path / "run")
    last, best = kept(tmp_path / "run")
    assert last == best and last is not None
    assert load_checkpoint(tmp_path / "run", "best")[1]["progress"]["best_step"] == int(best.removeprefix("step-"))
