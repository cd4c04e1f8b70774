"""Files that anyone may have written: damaged, endless, deep, or larger than they look."""

import os
from pathlib import Path

import pytest

from torchrum.lab.training import RunError, read_metrics
from torchrum.lab.training.files import read_json, write_atomic

LINE = '{"kind": "train", "step": 1, "loss": 0.5, "seconds": 1.0}\n'


def test_neither_a_device_nor_a_folder_is_written_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with pytest.raises(RunError, match=r"pipe cannot be written: it is not a plain file"):
        write_atomic(tmp_path / "pipe", b"x")
    for folder in (tmp_path, Path()):
        with pytest.raises(IsADirectoryError) as caught:
            write_atomic(folder, b"x")
        assert caught.value.filename == str(folder)  # not that of a file in between
    for nowhere in (tmp_path / "missing" / "x.html", tmp_path / ("x" * 300)):
        with pytest.raises(OSError) as refused:
            write_atomic(nowhere, b"x")
        assert refused.value.filename == str(nowhere)
    (tmp_path / "link").symlink_to("pipe")
    write_atomic(tmp_path / "link", b"x")  # the link goes, what it led to stays
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "link"}
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "Expecting value"),
        (b"\xff{}", "codec can't decode"),
        (b"[" * 100_000, "nested too deep"),
        (b"[" + b"9" * 5000 + b"]", "integer string conversion"),
        (b'"' + b"x" * 2**24 + b'"', "more than the 16,777,216 allowed"),
    ],
)
def test_a_damaged_json_file_is_named(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(RunError, match=r"a\.json cannot be read: .*" + message):
        read_json(tmp_path / "a.json")


def test_what_is_no_plain_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    (tmp_path / "folder.json").mkdir()
    for name in ("pipe", "zero"):
        with pytest.raises(RunError, match=f"{name}.json cannot be read: it is not a plain file"):
            read_json(tmp_path / f"{name}.json")
    with pytest.raises(RunError, match=r"folder.json cannot be read: Is a directory"):
        read_json(tmp_path / "folder.json")


@pytest.mark.parametrize(
    "line, message",
    [
        ("null", "has no attribute"),
        ('{"kind": "train"', "Expecting"),
        ('{"step": 1, "seconds": 1}', "kind"),
        ('{"kind": "train", "step": "1", "loss": 1, "seconds": 1}', "it needs a kind, a step, seconds"),
        ('{"kind": "train", "step": 1, "seconds": 1}', "it needs a kind, a step, seconds"),
        ('{"kind": "train", "step": 1, "loss": [], "seconds": 1}', "all numbers"),
        ("[" * 100_000, "objects are nested too deep"),
        ("\udcff", "codec can't decode"),
    ],
)
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
