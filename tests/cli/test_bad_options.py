"""Every option that makes no sense is answered with one line and exit code 2, before anything is written."""

import os

import pytest

from torchrum.cli import main

SMALL = "--steps 2 --task.delay 3 --task.validation_size 4 --model.hidden_size 4 --batch_size 2 --device cpu".split()
COPYING = ["train", "copying-rum-t200", *SMALL]
TINY, SWEEP = ["train", "lab.training.tiny:tiny"], ["sweep", "lab.training.tiny:tiny"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([*TINY, "--optimizer.eps", "nan"], "optimizer: eps is nan, but it must be at least 0, and finite"),
        ([*TINY, "--optimizer.eps", "inf"], "optimizer: eps is inf, but it must be at least 0, and finite"),
        ([*TINY, "--optimizer.eps", "-1"], "optimizer: eps is -1.0, but it must be at least 0"),
        ([*TINY, "--optimizer.lr", "nan"], "optimizer: lr is nan, but it must be greater than 0, and finite"),
        ([*TINY, "--optimizer.lr", "inf"], "optimizer: lr is inf, but it must be greater than 0, and finite"),
        ([*TINY, "--optimizer.clip", "inf"], "optimizer: clip is inf, but it must be greater than 0, and finite"),
        ([*TINY, "--optimizer.betas", "0.9"], "optimizer.betas is '0.9', but it must be 2 values"),
        ([*TINY, "--optimizer.betas", "0.9,0.9,0.9"], "optimizer.betas is '0.9,0.9,0.9', but it must be 2 values"),
        ([*TINY, "--optimizer.betas", "0.9,nan"], "must be at least 0 and below 1"),
        ([*TINY, "--optimizer.weight_decay", "nan"], "optimizer: weight_decay is nan, but it must be at least 0"),
        ([*TINY, "--stop_at", "nan"], "config: stop_at is nan, but it must be a finite number, or none"),
        ([*TINY, "--stop_at", "inf"], "config: stop_at is inf, but it must be a finite number, or none"),
        ([*TINY, "--average", "nan"], "config: average is nan"),
        ([*TINY, "--steps", "1e300"], "config: steps is"),
        ([*TINY, "--name", ".."], "config: name is '..', but it must be the name of a folder, not a path"),
        ([*TINY, "--name", "."], "config: name is '.', but it must be the name of a folder"),
        ([*TINY, "--name", "/tmp/x"], "config: name is '/tmp/x', but it must be the name of a folder, not a path"),
        ([*TINY, "--name", "a/../../b"], "config: name is 'a/../../b', but it must be the name of a folder"),
        ([*TINY, "--name", r"a\b"], "but it must be the name of a folder, not a path"),
        ([*TINY, "--name", "a\nb"], r"config: name is 'a\nb', but it must be the name of a folder"),
        ([*TINY, "--name="], "config: name is '', but it must be the name of a folder"),
        ([*TINY, "--model.num_layers", "1e9"], "model: num_layers is 1000000000, but it must be at most 1,000"),
        ([*COPYING, "--model.lam", "1e308"], "model: lam is 1e+308, but it must be between"),
        ([*COPYING, "--model.lam", "nan"], "model: lam is nan, but it must be between"),
        ([*COPYING, "--model.backend", "fused"], "backend='fused' cannot run: the input is on cpu"),
        ([*COPYING, "--task.symbols", "1"], "Copying: symbols=1; it must be a whole number of at least 2"),
        ([*COPYING, "--task.symbols", "1e12"], "Copying: symbols=1000000000000; it must be a whole number"),
        ([*COPYING, "--task.delay", "1e9"], "Copying: delay=1000000000; it must be a whole number"),
        ([*COPYING, "--task.validation_size", "1e12"], "Copying: validation_size=1000000000000; it must be"),
        (
            ["train", "recall-lstm-t30", "--task.values", "1"],
            "Recall: values=1; it must be a whole number of",
        ),
        (["train", "recall-lstm-t30", "--task.length", "1e9"], "Recall: length=1000000000; it must be a whole number"),
        (["train", ""], "no recipe ''; torchrum list shows"),
        (["train", ":"], "the recipe ':' cannot be loaded"),
        (["train", ".x:y"], "the recipe '.x:y' cannot be loaded"),
        (["sweep", ""], "no recipe ''"),
        (
            ["train", "own/mine.py:recipe"],
            "'own/mine.py:recipe' names a file; write MODULE:FUNCTION, as own.mine:recipe.",
        ),
        (["figure", "all", "--write", "nowhere.md"], "--write nowhere.md is not a file; name a page with markers"),
        (["list", ":"], "the recipe ':' cannot be loaded"),
        ([*TINY, "--seeds", "1000000000"], "--seeds is 1000000000, but it must be at most 10,000"),
        ([*SWEEP, "--seeds", "1000000000"], "--seeds is 1000000000, but it must be at most 10,000"),
        ([*SWEEP, "--grid", "name=../x,y"], "config: name is '../x', but it must be the name of a folder"),
        ([*TINY, "--seeds", "2", "--jobs", "0"], "--jobs is 0, but it must be at least 1"),
        ([*TINY, "--jobs", "2"], "--jobs needs several trainings: add --seeds N"),
        ([*SWEEP, "--jobs", "-1"], "--jobs is -1, but it must be at least 1"),
        ([*SWEEP, "--trials", "2", "--search", "steps=1:2", "--jobs", "2"], "leave --jobs out"),
        ([*TINY, "--seeds", "2", "--jobs", "2", "--devices", "2"], "set devices and nodes to 1, or jobs to 1"),
        ([*TINY, "--seed", "2147483647", "--seeds", "2"], "seed is 2147483648"),
        ([*COPYING, "--model.bidirectional", "true"], "model.bidirectional=True, but only readers of stories"),
        (["train", "char-rum", "--task.shown", "-1"], "CharLM: shown=-1; it must be a whole number of at least 0"),
        ([*SWEEP, "--resume", "nowhere"], "--resume nowhere is not a folder; leave --resume out"),
        ([*TINY, "--seeds", "2", "--resume", "nowhere"], "--resume nowhere is not a folder; leave --resume out"),
        (["train", "babi-rum", "--resume", "nowhere"], "--resume nowhere is not a folder; leave --resume out"),
        (["train", "COPYING-RUM-T200"], "no recipe 'COPYING-RUM-T200'; did you mean 'copying-rum-t200'?"),
        (["TRAIN"], "no command 'TRAIN'; did you mean 'train'?"),
        (["train", "BABI-ROM"], "no recipe 'BABI-ROM'; did you mean 'babi-rum'?"),
        ([*TINY, "--set", "=3"], "'=3' is not an assignment; write it as field=value."),
        (["train", "--", "copying-rom"], "no recipe 'copying-rom'; did you mean 'copying-rum'?"),
        (["train", "babi-rum", "--task.task", "3"], "--task.task would be the same for every model of babi-rum"),
        (["train", "babi-rum", "--set", "name = x"], "--name would be the same for every model of babi-rum; --out DIR"),
        ([*SWEEP, "--grid", "steps=2,3, 2"], "'steps=2,3, 2' has a value twice; to repeat runs, pass"),
        (["list", "copying-rum", "--all"], "--all lists the recipes; leave it out to see the fields of copying-rum;"),
        (["report", "--write", "README.md", "--out", "x.html"], "--write makes no page; leave --out out;"),
        (["figure", "cell", "--out", __file__], "is a file; name a folder for the figures;"),
        (["list", ""], "no recipe ''"),
        (["list", "json:dumps"], "the recipe 'json:dumps' cannot be loaded: missing a required argument: 'obj'"),
        (["figure", "copying", "--recipe", ""], "no recipe ''"),
        (["table", "--results", "nowhere"], "nowhere is not a folder; pass the folder of a results ledger"),
        (["table", ""], "no task ''; there are: babi, char, copying, recall"),
        (["train"], "train needs a recipe, or --resume RUN"),
        ([*TINY, "--stepz", "3"], "no field 'stepz'; did you mean 'steps'?"),
        ([*TINY, "--steps"], "--steps needs a value"),
        ([*TINY, "--optimizer.nonsense", "1"], "no field 'optimizer.nonsense'; there are: optimizer.betas"),
        (["train", "recall-rum-lam1", "--task.length", "31"], "odd"),
        (SWEEP, "a sweep needs --seeds N, --grid FIELD=A,B or --trials N with --search; to train once: "),
        ([*SWEEP, "--seeds", "0"], "--seeds is 0, but it must be at least 1"),
        ([*SWEEP, "--grid", "nonsense"], "'nonsense' is not a grid; write it as field=a,b,c."),
        ([*SWEEP, "--grid", "optimizer.lrr=1,2"], "did you mean 'optimizer.lr'?"),
        ([*SWEEP, "--grid", "seed=5,6"], "'seed=5,6' cannot be a grid; pass --seed 5 --seeds N"),
        ([*SWEEP, "--trials", "-2", "--search", "optimizer.lr=1:2"], "--trials is -2"),
        ([*SWEEP, "--trials", "2", "--search", "optimizer.lr=1:2:3"], "is not a search range; write"),
        ([*SWEEP, "--trials", "2", "--grid", "steps=1,2"], "and no --grid or --seeds"),
        ([*SWEEP, "--storage", "sqlite:///x", "--seeds", "2"], "a search needs --trials N and --search"),
        (["figure", "unknown"], "'unknown' is neither a figure (copying, recall, "),
        (["table", "--within", "0"], "--within is 0, but it must be at least 1;"),
        (
            ["table", "--best", "9", "--within", "9"],
            "--best and --within make different tables; pass only one of them;",
        ),
        (["table", "--write", "f", "--within", "9"], "put it in the marker instead: <!-- torchrum:table recall within"),
    ],
)
def test_a_senseless_option_is_one_line(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("torchrum: ")
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", ["1e9", "1e12", "1e18"])
def test_sizes_that_cannot_even_be_counted_are_one_line(tmp_path, capsys, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    assert main([*COPYING, "--model.hidden_size", value]) in (1, 2)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "parameters take" in error or "does not fit into memory" in error


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE is 'abc', but devices * nodes is 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0', but devices * nodes is 1"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is '2', but devices * nodes is 1; pass --devices and --nodes to match"),
        ({"SLURM_NTASKS": "2"}, "SLURM_NTASKS is '2', but devices * nodes is 1; pass --devices and --nodes to match"),
        ({"SLURM_NTASKS": "two"}, "SLURM_NTASKS is 'two', but devices * nodes is 1"),
    ],
)
def test_variables_of_a_launcher_that_is_not_there_are_one_line(tmp_path, capsys, monkeypatch, variables, message):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main([*TINY, "--out", str(tmp_path), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "variables", [{}, {"WORLD_SIZE": "1"}, {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "bash"}], ids=str
)
def test_several_machines_need_a_launcher(tmp_path, capsys, monkeypatch, variables):
    """It waited for the other machines without a word."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_NTASKS", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main([*TINY, "--out", str(tmp_path), "--quiet", "--nodes", "2"]) == 2
    assert capsys.readouterr().err == (
        "torchrum: nodes is 2, but nothing has started processes on other machines; start them with srun or torchrun, "
        "or pass --nodes 1.\n"
    )
    assert not os.listdir(tmp_path)


def test_srun_must_have_started_the_processes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    assert main([*TINY, "--out", str(tmp_path), "--devices", "2"]) == 2
    assert "SLURM_PROCID is not set; start the processes with srun" in capsys.readouterr().err
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")  # a person's shell in an allocation
    assert main([*TINY, "--out", str(tmp_path), "--quiet", "--steps", "1"]) == 0
