"""The commands around the ledger, from run to table and figure."""

import shutil

import pytest

from torchrum.cli import main


def test_from_run_to_table_and_figure(run, tmp_path, capsys):
    results, readme = str(tmp_path / "results"), tmp_path / "README.md"
    assert main(["record", str(run), "--results", results, "--commit", "abc1234", "--note", "a note"]) == 0
    assert capsys.readouterr().out.strip().startswith(f"{results}/copying.jsonl: copying-lstm-t200-seed7-")

    assert main(["table", "--within", "1000", "--results", results]) == 0
    assert "No two models of copying were run for 1,000 / T steps." in capsys.readouterr().out
    assert main(["table", "copying", "--results", results]) == 0
    printed = capsys.readouterr().out
    assert "| LSTM | H 4, rmsprop_tf 0.001" in printed
    assert "a note" in printed

    readme.write_text("<!-- torchrum:table copying -->\n<!-- /torchrum:table -->\n")
    assert main(["table", "--write", str(readme), "--results", results]) == 0
    assert main(["table", "--write", str(readme), "--results", results]) == 0
    assert "tables written" in (out := capsys.readouterr().out)
    assert "up to date" in out
    assert printed.strip() in readme.read_text()

    assert main(["figure", "copying", "--results", results, "--out", str(tmp_path / "figures")]) == 0
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == ["copying-dark.svg", "copying.svg"]


def test_the_curve_of_a_run(run, capsys):
    assert main(["figure", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "curve.png")


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["record", "nowhere", "--results", "ledger"], 1, "nowhere is not a run folder"),
        (["figure", "recall", "--results", "nowhere"], 2, "nowhere is not a folder; pass the folder of a results"),
        (["report", "--results", "nowhere"], 2, "nowhere is not a folder; pass the folder of a results ledger"),
        (["table", "--results", "nowhere"], 2, "nowhere is not a folder; pass the folder of a results ledger"),
    ],
)
def test_mistakes_have_a_message_and_an_exit_code(arguments, code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    assert message in capsys.readouterr().err


def test_an_empty_ledger_says_so(tmp_path, capsys):
    assert main(["table", "--results", str(tmp_path)]) == 0
    assert "holds no run yet" in capsys.readouterr().out


def test_a_table_for_a_file_that_is_not_there(tmp_path, capsys):
    assert main(["table", "--write", str(tmp_path / "missing.md"), "--results", str(tmp_path)]) == 1
    assert "missing.md cannot be read" in capsys.readouterr().err


def test_a_torn_or_missing_curve_is_drawn_anew(run, tmp_path, capsys):
    copy, victim = shutil.copytree(run, tmp_path / "run"), tmp_path / "victim"
    assert main(["figure", str(copy)]) == 0
    whole = (copy / "curve.png").read_bytes()
    for damage in (lambda curve: curve.write_bytes(whole[:100]), lambda curve: curve.unlink()):
        damage(copy / "curve.png")
        assert main(["figure", str(copy)]) == 0
        assert (copy / "curve.png").read_bytes() == whole
    victim.write_text("safe")
    (copy / "curve.png").unlink()
    (copy / "curve.png").symlink_to(victim)
    assert main(["figure", str(copy)]) == 0
    assert victim.read_text() == "safe"
    assert not [path for path in copy.iterdir() if path.name.endswith(".tmp")]


def test_nothing_is_written_into_a_folder_that_nobody_named(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["record", str(run), "--commit", "abc1234"]) == 2
    assert "name the folder of your ledger with --results DIR" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main(["record", str(run), "--commit", "abc1234", "--results", "ledger"]) == 0
    assert main(["figure", "copying", "--results", "ledger"]) == 0
    assert capsys.readouterr().out.split()[-2:] == ["figures/copying.svg", "figures/copying-dark.svg"]
    (tmp_path / "src" / "torchrum" / "paper").mkdir(parents=True)  # as in a clone
    assert main(["record", str(run), "--commit", "abc1234"]) == 0
    assert main(["figure", "copying"]) == 0
    assert capsys.readouterr().out.split()[-2:] == ["docs/figures/copying.svg", "docs/figures/copying-dark.svg"]
