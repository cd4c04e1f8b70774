"""Files that are replaced whole, and damaged ones that are read. Tests of training/files.py and run_folder.py."""

from pathlib import Path

import pytest

from torchrum.lab.training import RunError, read_metrics
from torchrum.lab.training.files import read_json, write_atomic

LINE = '{"kind": "train", "step": 1, "loss": 0.5, "seconds": 1.0}\n'


def test_what_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, Path()):
        with pytest.raises(IsADirectoryError) as caught:
            write_atomic(folder, b"x")
        assert caught.value.filename == str(folder)  # not that of a file in between
    for nowhere in (tmp_path / "missing" / "x.html", tmp_path / ("x" * 300)):
        with pytest.raises(OSError) as refused:
            write_atomic(nowhere, b"x")
        assert refused.value.filename == str(nowhere)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content, message", [(b"", "Expecting value"), (b"\xff{}", "codec can't decode")])
def test_a_damaged_json_file_is_named(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(RunError, match=r"a\.json cannot be read: .*" + message):
        read_json(tmp_path / "a.json")


def test_a_folder_is_no_json_file(tmp_path):
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(RunError, match=r"folder.json cannot be read: Is a directory"):
        read_json(tmp_path / "folder.json")


@pytest.mark.parametrize("line, message", [('{"kind": "train"', "Expecting"), ("\udcff", "codec can't decode")])
def test_a_damaged_line_of_metrics_is_named(tmp_path, line, message):
    content = (LINE + line + "\n" + LINE).encode(errors="surrogateescape")
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(RunError, match=r"metrics\.jsonl, line 2, is damaged: .*" + message):
        read_metrics(tmp_path)


def test_a_file_is_replaced_and_not_written_through_a_link(tmp_path):
    (tmp_path / "victim").write_text("safe")
    (tmp_path / "a.json").symlink_to(tmp_path / "victim")
    write_atomic(tmp_path / "a.json", b"new")
    assert ((tmp_path / "victim").read_text(), (tmp_path / "a.json").read_text()) == ("safe", "new")
    assert not (tmp_path / "a.json").is_symlink()
