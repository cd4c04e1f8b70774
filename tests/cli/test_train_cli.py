import contextlib
import errno
import json
import os
import signal
import sys
import time
import warnings

import pytest
from matplotlib.rcsetup import validate_backend

from lab.training.processes import run_command, start
from lab.training.tiny import tiny
from torchrum.cli import leaving_at_once, main, show_warning
from torchrum.cli.trained import show_scores
from torchrum.lab.recipes import load_recipe
from torchrum.lab.training import evaluation, read_metrics
from torchrum.lab.training.trainer import describe_model

TINY = "lab.training.tiny:tiny"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["sweep"], "the following arguments are required: recipe"),
        (["sweep", TINY, "--seeds", "x"], "argument --seeds: invalid int value: 'x'; see torchrum sweep --help."),
        (["bench", "--suite", "nonsense"], "argument --suite: invalid choice: 'nonsense'"),
        (["eval"], "the following arguments are required: run"),
        (["demo", "--steps", "x"], "argument --steps: invalid int value: 'x'"),
        (["bench", "--seconds", "x"], "argument --seconds: invalid float value: 'x'; see torchrum bench"),
    ],
)
def test_what_argparse_refuses_has_exit_code_2(capsys, arguments, message):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """Runs whose curve would have been drawn: that takes longer than to train them."""
    runs = []
    monkeypatch.setattr("torchrum.paper.plots.run.draw_curve", runs.append)
    return runs


def test_the_curve_of_each_run_is_drawn(tmp_path, drawn):
    out = ["--out", str(tmp_path), "--steps", "2", "--quiet"]
    assert main(["train", TINY, *out]) == 0
    assert main(["train", TINY, "--seeds", "2", *out]) == 0
    assert main(["train", "--resume", str(tmp_path / "tiny"), "--steps", "3", "--quiet"]) == 0
    assert main(["sweep", TINY, "--grid", "model.hidden_size=5", *out]) == 0
    assert [str(run.relative_to(tmp_path)) for run in drawn] == [
        *("tiny", "tiny-2/seed-0", "tiny-2/seed-1", "tiny", "tiny-3/model.hidden_size=5/seed-0")
    ]


def test_a_warning_of_ours_is_one_line_without_code(tmp_path, capsys):
    given = ["--model.layer", "rum", "--model.dropout", "0.5", "--out", str(tmp_path), "--steps", "2", "--quiet"]
    before = warnings.showwarning
    assert main(["train", TINY, *given]) == 0
    error = capsys.readouterr().err
    assert "torchrum: warning: RUM: dropout=0.5 has no effect: it acts between layers, and num_layers is 1.\n" in error
    assert "UserWarning" not in error
    assert warnings.showwarning is before
    show_warning("theirs", UserWarning, str(tmp_path / "own.py"), 7)
    assert capsys.readouterr().err == f"{tmp_path / 'own.py'}:7: UserWarning: theirs\n"


def test_a_run_ends_well_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrum.paper.plots.run", None)
    assert main(["train", TINY, "--out", str(tmp_path), "--steps", "2", "--quiet"]) == 0
    assert f"the curve of {tmp_path / 'tiny'} was not drawn" in capsys.readouterr().err


def test_a_run_ends_well_on_a_disk_that_is_full_when_its_curve_is_drawn(tmp_path, capsys, monkeypatch):
    def full(run):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("torchrum.paper.plots.run.draw_curve", full)
    assert main(["train", TINY, "--out", str(tmp_path), "--steps", "2", "--quiet"]) == 0
    error = capsys.readouterr().err
    assert f"No space left on device; draw it later with: torchrum figure {tmp_path / 'tiny'}" in error


def test_a_backend_that_matplotlib_does_not_know_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "nonsense")
    monkeypatch.setattr("torchrum.cli.command", lambda name: lambda arguments: validate_backend("nonsense"))
    assert main(["figure", "copying"]) == 2
    message = "torchrum: MPLBACKEND is 'nonsense', which matplotlib does not know; unset it.\n"
    assert capsys.readouterr().err == message


def test_train_eval_and_resume(tmp_path, capsys):
    out = str(tmp_path)
    assert main(["train", TINY, "--out", out, "--steps", "12", "--task.length=3", "--set", "optimizer.lr=0.02"]) == 0
    run = tmp_path / "tiny"
    config = json.loads((run / "config.json").read_text())
    assert (config["steps"], config["task"]["length"], config["optimizer"]["lr"]) == (12, 3, 0.02)
    captured = capsys.readouterr()
    assert "tiny step 12/12" in captured.err
    assert f"finished at step 12: {run}" in captured.err

    assert main(["train", "--resume", str(run), "--steps", "20", "--quiet"]) == 0
    assert read_metrics(run)[-1]["step"] == 20
    assert main(["eval", str(run), "--json", "--split", "validation", "--checkpoint", "last", "--device", "cpu"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert scores["loss"] == pytest.approx(read_metrics(run, "validation")[-1]["loss"], rel=1e-6)
    assert main(["eval", str(run), "--device", "cpu"]) == 0
    assert "(memoryless loss in nats)" in capsys.readouterr().out

    assert main(["train", TINY, "--out", out, "--steps", "2", "--quiet"]) == 0
    assert (tmp_path / "tiny-2" / "result.json").exists()  # the first run is not touched


def test_a_look_at_a_run_that_trains_on_has_the_step_of_its_checkpoint(tmp_path, monkeypatch, capsys):
    assert main(["train", TINY, "--out", str(tmp_path), "--steps", "12", "--quiet"]) == 0
    run, evaluate = tmp_path / "tiny", evaluation.evaluate

    def slowly(*where):
        scores = evaluate(*where)
        assert main(["train", "--resume", str(run), "--steps", "20", "--quiet"]) == 0
        return scores

    monkeypatch.setattr(type(tiny().task), "has_test", True)
    monkeypatch.setattr(evaluation, "evaluate", slowly)
    assert main(["eval", str(run), "--checkpoint", "last", "--device", "cpu"]) == 0
    assert [look.step for look in evaluation.read_looks(run)] == [12]


def test_scores_of_any_size_fit_a_line(capsys):
    show_scores({"bits": 112911.0, "word_perplexity": 1e200, "loss": 0.123456789}, tiny().task)
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert words[:3] == [["bits", "112,911"], ["word_perplexity", "1e+200"], ["loss", "0.123457"]]


def test_seeds_and_grids(tmp_path):
    out = ["--out", str(tmp_path), "--steps", "2", "--quiet"]
    assert main(["train", TINY, "--seeds", "2", *out]) == 0
    assert {path.name for path in (tmp_path / "tiny").iterdir()} == {"seed-0", "seed-1", "summary.json"}
    assert main(["sweep", TINY, "--grid", "model.hidden_size=2,3", *out]) == 0
    assert (tmp_path / "tiny-2" / "model.hidden_size=3" / "seed-0" / "result.json").exists()
    assert main(["sweep", TINY, "--trials", "2", *out]) == 2


def test_a_search_in_a_storage(tmp_path):
    pytest.importorskip("optuna", reason="Optuna is an extra")
    asked = ["--trials", "1", "--search", "optimizer.lr=1e-3:1e-2", "--storage", f"journal://{tmp_path}/study"]
    for trials, name in (("1", "tiny"), ("2", "tiny-2")):  # a second worker gets a folder of its own
        assert main(["sweep", TINY, *asked, "--trials", trials, "--out", str(tmp_path), "--steps", "2", "--quiet"]) == 0
        assert len(list((tmp_path / name).glob("trial-*/result.json"))) == 1


def test_fields_may_stand_anywhere_and_stray_words_are_refused(tmp_path, capsys):
    out = ["--quiet", "--out", str(tmp_path)]
    assert main(["train", "--steps", "2", TINY, *out, "--log-every", "1"]) == 0
    assert len(read_metrics(tmp_path / "tiny", "train")) == 2
    assert main(["train", TINY, "stray", *out]) == 2
    assert "stray" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["char-rum"], ["char-rum", "--seeds", "2"], ["babi-rum", "--task=2"]], ids=str)
def test_without_data_nothing_is_left(tmp_path, capsys, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHRUM_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("TORCHRUM_OFFLINE", "1")
    assert main(["train", *arguments, "--device", "cpu", "--quiet"]) == 3
    error = capsys.readouterr().err
    assert error.startswith("torchrum: ") and "TORCHRUM_OFFLINE is set" in error
    assert not list(tmp_path.iterdir())


def test_a_run_is_not_resumed_as_another_recipe(tmp_path, capsys):
    assert main(["train", TINY, "--steps", "2", "--quiet", "--out", str(tmp_path)]) == 0
    resume = ["--resume", str(tmp_path / "tiny"), "--steps", "3", "--quiet"]
    assert main(["train", "copying-lstm-t200", *resume]) == 2
    assert "tiny is a run of tiny, not of copying-lstm-t200; leave the recipe out, or" in capsys.readouterr().err
    assert main(["train", TINY, *resume]) == 0


def test_a_run_with_a_name_of_its_own_is_resumed(tmp_path, capsys):
    """By the command that started it, as the advice at its end says; a task of the user's own needs the recipe."""
    named, quiet, out = [TINY, "--name", "my own"], ["--steps", "2", "--quiet"], ["--out", str(tmp_path)]
    one, several = ["--resume", str(tmp_path / "my own")], ["--resume", str(tmp_path / "my own-2")]
    assert main(["train", *named, *quiet, *out]) == 0
    assert main(["train", *named, "--seeds", "1", *quiet, *out]) == 0
    assert main(["train", *named, *one, "--steps", "3", "--quiet"]) == 0
    assert main(["train", *named, "--seeds", "2", *several, *quiet]) == 0
    assert main(["sweep", *named, "--seeds", "3", *several, *quiet]) == 0
    assert main(["train", TINY, *one, "--steps", "4"]) == 2
    assert "is a run of my own, not of tiny; leave the recipe out, or add --name 'my own'" in capsys.readouterr().err
    assert main(["train", TINY, "--name", "other", *one, "--steps", "4"]) == 2
    assert "a resumed run cannot change name 'my own' -> 'other'" in capsys.readouterr().err


def test_a_resumed_run_stays_in_its_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quiet, elsewhere = ["--steps", "2", "--quiet"], ["--out", "elsewhere"]
    assert main(["train", TINY, *quiet]) == 0
    assert main(["train", TINY, "--seeds", "1", *quiet]) == 0
    one, several = ["--resume", "runs/tiny"], ["--resume", "runs/tiny-2"]
    for command in (["train", *one], ["train", TINY, "--seeds", "2", *several], ["sweep", TINY, *several]):
        capsys.readouterr()
        assert main([*command, *quiet, *elsewhere]) == 2
        assert capsys.readouterr().err == (
            f"torchrum: --out elsewhere does not contain {command[-1]}, and a resumed run stays in its folder; leave "
            "--out out, or --resume to start a new run there.\n"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    # the last two as in the command that started the run
    for same, steps in (("runs/tiny", "3"), ("runs", "4"), (str(tmp_path / "runs"), "5")):
        assert main(["train", *one, "--out", same, "--quiet", "--steps", steps]) == 0
    assert main(["train", TINY, "--seeds", "2", *several, "--out", "runs", *quiet]) == 0


def test_several_runs_are_not_resumed_as_one(tmp_path, capsys):
    (tmp_path / "set" / "seed-0" / "task").mkdir(parents=True)
    (tmp_path / "set" / "seed-0" / "task" / "config.json").touch()
    assert main(["train", "--resume", str(tmp_path / "set")]) == 2
    error = capsys.readouterr().err
    assert f"run the command that started them with --resume {tmp_path / 'set'}; to resume one: " in error
    assert error.endswith(f"torchrum train --resume {tmp_path / 'set' / 'seed-0' / 'task'}\n")


def test_a_sweep_is_not_resumed_in_a_folder_of_something_else(tmp_path, capsys):
    out = ["--steps", "2", "--quiet", "--out", str(tmp_path)]
    assert main(["train", TINY, "--seeds", "1", *out]) == 0
    several, one = tmp_path / "tiny", tmp_path / "tiny" / "seed-0"
    for command in (["sweep", "copying-lstm-t200"], ["train", "copying-lstm-t200", "--seeds", "2"]):
        assert main([*command, "--resume", str(several)]) == 2
        assert "tiny contains runs of tiny, not of copying-lstm-t200; leave --resume out" in capsys.readouterr().err
        assert main([*command, "--resume", str(one)]) == 2
        assert f"seed-0 is a single run; resume it with: torchrum train --resume {one}" in capsys.readouterr().err
    assert main(["train", "babi-gru", "--task", "1", "--resume", str(several)]) == 2
    assert "contains runs of tiny, not of babi-gru-qa1 and so on" in capsys.readouterr().err
    assert [path.name for path in several.iterdir() if path.is_dir()] == ["seed-0"]


def test_a_failed_run_has_exit_code_1(tmp_path, capsys):
    assert main(["train", "--resume", str(tmp_path)]) == 1
    assert "is not a run folder: it has no config.json" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "none")]) == 1
    assert main(["train", TINY, "--out", "/proc/torchrum", "--quiet"]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["record", "nonsense", "--results", "ledger"], "nonsense is not a run folder: it does not exist."),
        (["eval", "missing-run"], "missing-run is not a run folder: it does not exist."),
        (["eval", "file"], "file is not a run folder: it is a file."),
        (["eval", "several"], "it has no config.json. It contains runs; name one of them, such as several/seed-0."),
        (
            ["train", TINY, "--out", "file", "--quiet"],
            "file/tiny cannot be written: Not a directory. Choose another --out.",
        ),
        (["table", "--write", "missing.md"], "missing.md cannot be read: No such file or directory."),
        (["figure", "recall"], "results has nothing to draw recall from; add a run with torchrum record RUN."),
        (["bench", "--report", "missing.json"], "missing.json"),
    ],
)
def test_a_failure_is_one_line_with_exit_code_1(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "several" / "seed-0").mkdir(parents=True)
    (tmp_path / "several" / "seed-0" / "config.json").touch()
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("torchrum: ")
    assert message in error
    assert error.count("\n") == 1


def test_output_may_be_cut_off(monkeypatch):
    """As ``torchrum --help | head -1``."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["--help"]) == 128 + signal.SIGPIPE


def test_an_error_of_ours_keeps_its_traceback(monkeypatch):
    def broken(arguments):
        raise RuntimeError("a bug")

    monkeypatch.setattr("torchrum.cli.command", lambda name: broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["train"])


def test_ungranted_amx_is_named_with_its_cure(capsys, monkeypatch):
    def fail(arguments):
        raise RuntimeError("could not create a primitive")

    monkeypatch.setattr("torchrum.cli.command", lambda name: fail)
    assert main(["list"]) == 1
    assert "ONEDNN_MAX_CPU_ISA" in capsys.readouterr().err


def test_without_the_extra_the_command_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning_fabric", None)
    assert main(["train", TINY, "--out", str(tmp_path), "--quiet"]) == 2
    assert 'pip install "torchrum[train]"' in capsys.readouterr().err


def test_without_the_extra_an_import_says_what_to_install(monkeypatch):
    import torchrum.lab.training

    monkeypatch.setitem(sys.modules, "rich.console", None)
    for name in ("torchrum.lab.training.trainer", "torchrum.lab.training.progress"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModuleNotFoundError, match=r'Trainer needs rich.console; .* pip install "torchrum\[train\]"'):
        torchrum.lab.training.Trainer  # noqa: B018
    monkeypatch.setitem(sys.modules, "torchrum.lab.training.files", None)
    with pytest.raises(ModuleNotFoundError, match="halted") as caught:  # nothing that the extra would bring
        torchrum.lab.training.Trainer  # noqa: B018
    assert "pip" not in str(caught.value)


def test_a_model_is_described_by_the_options_that_it_is_closest_to():
    assert describe_model(load_recipe("char-rum").model) == (
        "rum, 256 units, the tanh options, eta 7.0, layer_norm True, ln_order authors"
    )
    assert describe_model(load_recipe("copying-rum-lam1-t200").model).endswith("the paper's options, lam 1")


def test_a_run_introduces_itself_and_is_named_by_its_size(tmp_path, capsys):
    sizes = ["--task.delay", "5", "--model.hidden_size", "8", "--batch_size", "4", "--steps", "3", "--device", "cpu"]
    assert main(["train", "copying-rum-lam1-t200", *sizes, "--out", str(tmp_path)]) == 0
    run = tmp_path / "copying-rum-lam1-t5"  # with a delay of 5 it is no run of t200
    assert (
        json.loads((run / "config.json").read_text())["name"] == "copying-rum-lam1-t200"
    )  # the recipe, which the ledger asks for
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "copying-rum-lam1-t5: rum, 8 units, the paper's options, lam 1, 473 parameters"
    assert lines[1].startswith("on the CPU (") and lines[1].endswith(f"32-true; run folder {run}")
    assert lines[2] == "loss in nats; the memoryless baseline is 0.8318"
    assert lines[3].startswith("copying-rum-lam1-t5 step 1/3  loss ")  # not only at the 50th


def interrupt_imports(errors: str, packages: str, out: str | None) -> None:
    """In a process of its own: swallow Ctrl-C, as packages do in an import, and Python in its import locks."""
    with open(errors, "w", buffering=1) as sys.stderr:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if out is None:
            with leaving_at_once(), contextlib.suppress(BaseException):
                os.kill(os.getpid(), signal.SIGINT)
        else:
            sys.modules.pop("lightning_fabric", None)  # the fork server may have imported it
            sys.path.insert(0, packages)
            sys.exit(main(["train", TINY, "--out", out]))


@pytest.mark.parametrize("during", ["the command's", "the engine's"])
def test_ctrl_c_during_the_imports_is_not_lost(tmp_path, during):
    (tmp_path / "lightning_fabric.py").write_text(
        "import os, signal\ntry: os.kill(os.getpid(), signal.SIGINT)\nexcept BaseException: pass\nclass Fabric: pass\n"
    )
    out = None if during == "the command's" else str(tmp_path / "runs")
    process = start(interrupt_imports, str(tmp_path / "errors"), str(tmp_path), out)
    process.join(60)
    assert (process.exitcode, (tmp_path / "errors").read_text()) == (130, "torchrum: interrupted\n")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves_with_its_code(tmp_path, number):
    run = tmp_path / "longer"
    (tmp_path / "errors").touch()
    arguments = ["train", "lab.training.tiny:longer", "--out", str(tmp_path)]
    process = start(run_command, arguments, str(tmp_path / "errors"))
    while not (run / "checkpoints" / "index.json").exists():
        assert process.is_alive(), (tmp_path / "errors").read_text()
        time.sleep(0.05)
    os.kill(process.pid, number)
    process.join(60)
    error = (tmp_path / "errors").read_text()
    assert process.exitcode == 128 + number
    assert f"{number.name}: saved at step" in error
    assert f"torchrum train --resume {run}" in error
    assert "Traceback" not in error
