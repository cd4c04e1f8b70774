"""Ways to damage a run folder or a ledger, each chosen by a seeded generator."""

import hashlib
import io
import json
import os
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DEEP = "[" * 100_000 + "]" * 100_000
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 7, 10**9, 10**12, 2**63, 10**400, -(10**30), 0.5, -0.0, 1e308, 1e-320),
    *(float("nan"), float("inf"), "", "x", "os:abort", "../../..", "/etc/passwd", "é\n\x1b[31m", "9" * 300),
    *([], {}, [[]], [None], [1, 2, 3], {"a": 1}, {"type": "os:abort"}, [0.9], "nan", "2026-01-01", "train", "SIGX"),
    *("\x00", "\ud800", "\u202e", "x" * 5000, "<script>", "|", "HEAD", 2**53 + 1, [0] * 1000, [1e308, 1e308], [True]),
]
WHOLE = [
    *(b"", b"null", b"[]", b"{}", b'""', b"0", b"NaN", b"{", b'{"a": ', b"\xff\xfe\x00", b"\xef\xbb\xbf{}", bytes(64)),
    *(b"1e999", b'"\\ud800"', b'{"\\u0000": 1}', b"\x00", b"[" + b"0," * 200_000 + b"0]"),
    *(DEEP.encode(), b'{"a":' * 500 + b"1" + b"}" * 500, b"[" + b"9" * 5000 + b"]", "é".encode("latin-1"), b"\n\n\n"),
]


def mutate(root: Path, outside: Path, choose: random.Random, again: bool) -> str:
    """Change one file below ``root``; links lead to ``outside``. Returns what was done.

    A second change, ``again``, may meet the first, so it does not look into what it changes.
    """
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink() and path.stat().st_size)
    path = choose.choice(files)
    ways = [replace_whole, cut, flip, overwrite, remove, as_folder, as_link, as_pipe, copy_of_another]
    ways += [as_loop, grow, repeat_line, copy_of_folder]
    if path.suffix in (".json", ".jsonl") and not again:
        ways += [edit_json] * 12
    if path.name in ("state.pt", "model.safetensors") and not again:
        ways += [sign_anew] * 2
    if path.name == "state.pt" and not again:
        ways += [edit_state] * 8 + [compress]
    way = choose.choice(ways)
    return f"{path.relative_to(root)}: {way.__name__} {way(path, outside, choose, files)}"


def replace_whole(path: Path, outside: Path, choose: random.Random, files: list[Path]) -> str:
    content = choose.choice(WHOLE)
    path.write_bytes(content)
    return repr(content[:20])


def cut(path: Path, outside: Path, choose: random.Random, files: list[Path]) -> str:
    content = path.read_bytes()
    path.write_bytes(content[: choose.randrange(len(content) + 1)])
    return ""


def flip(path: Path, outside: Path, choose: random.Random, files: list[Path]) -> str:
    content = bytearray(path.read_bytes())
    for _ in range(choose.choice((1, 1, 8))):
        content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
    path.write_bytes(bytes(content))
    return ""


def overwrite(path: Path, outside: Path, choose: random.Random, files: list[Path]) -> str:
    content = bytearray(path.read_bytes())
    start = choose.randrange(len(content))
    content[start : start + choose.randrange(1, 40)] = choose.randbytes(choose.randrange(40))
    path.write_bytes(bytes(content))
    return ""


def remove(path: Path, outside: Path, choose: random.Random, files: list[Path]) -> str:
    path.unlink()
    return ""


def as_folder(path: Path, outside: Path, choose: random.Random, files: list[Path]) -> str:
    path.unlink()
    path.mkdir()
    return ""


def as_link(path: Path, outside: Path, choose: random.Random, files: list[Path]) -> str:
    target = choose.choice([outside / "victim", outside / "missing", Path("/dev/zero"), outside])
    if choose.random() < 0.3 and path.parent.name.startswith("step-"):
        path = path.parent  # a whole checkpoint
        shutil.move(path, outside.parent / "moved")
        target = outside.parent / "moved"
    else:
        path.unlink()
    path.symlink_to(target)
    return str(target.name)


def as_pipe(path: Path, outside: Path, choose: random.Random, files: list[Path]) -> str:
    path.unlink()
    os.mkfifo(path)
    return ""


def as_loop(path: Path, outside: Path, choose: random.Random, files: list[Path]) -> str:
    path.unlink()
    path.symlink_to(path.name)
    return ""


def grow(path: Path, outside: Path, choose: random.Random, files: list[Path]) -> str:
    """Add zeros that take no place on the disk."""
    size = choose.choice((2**24 + 1, 2**31, 2**36))
    os.truncate(path, size)
    return str(size)


def repeat_line(path: Path, outside: Path, choose: random.Random, files: list[Path]) -> str:
    lines = path.read_bytes().split(b"\n")
    place = choose.randrange(len(lines))
    path.write_bytes(b"\n".join([*lines[:place], *lines[place : place + 1] * 2, *lines[place + 1 :]]))
    return str(place)


def copy_of_folder(path: Path, outside: Path, choose: random.Random, files: list[Path]) -> str:
    """Beside a checkpoint, another of almost the same name."""
    if not path.parent.name.startswith("step-"):
        return "none"
    name = choose.choice(("step-00000001", "step-99999999", "step-1", "copy"))
    shutil.copytree(path.parent, path.parent.with_name(name), symlinks=True, ignore=pipes)
    return name


def pipes(folder: str, names: list[str]) -> list[str]:
    """Those of ``names`` that an earlier mutation has made a pipe, which cannot be copied."""
    return [name for name in names if Path(folder, name).is_fifo()]


def copy_of_another(path: Path, outside: Path, choose: random.Random, files: list[Path]) -> str:
    other = choose.choice(files)
    path.write_bytes(other.read_bytes())
    return other.name


def edit_json(path: Path, outside: Path, choose: random.Random, files: list[Path]) -> str:
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    place = choose.randrange(len(lines))
    data = json.loads(lines[place])
    done = edit(data, choose)
    lines[place] = json.dumps(done[0])
    path.write_text("\n".join(lines) + "\n")
    if path.name == "metrics.jsonl" and choose.random() < 0.5:  # as if the run itself had written it
        sign_metrics(path.parent)
    return done[1]


def edit(data: Any, choose: random.Random) -> tuple[Any, str]:
    """Change one place in a tree, and say which."""
    places = [((), data), *walk(data, ())]
    where, old = choose.choice(places[1:] or places)
    value = choose.choice(VALUES)
    if not where:
        return value, f"whole -> {value!r:.40}"
    owner = data
    for key in where[:-1]:
        owner = owner[key]
    kind = choose.random()
    if kind < 0.15:
        del owner[where[-1]]
        return data, f"{where} removed"
    if kind < 0.25 and isinstance(owner, dict):
        owner[choose.choice(("surprise", "a\nb", "type", "folder"))] = value
        return data, f"beside {where}: {value!r:.40}"
    if kind < 0.35 and isinstance(old, int | float) and not isinstance(old, bool):
        value = old + choose.choice((1, -1, 0.5, 1000))
    owner[where[-1]] = value
    return data, f"{where} -> {value!r:.40}"


def walk(data: Any, where: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], Any]]:
    items: Any = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    found = []
    for key, value in items:
        found += [((*where, key), value), *walk(value, (*where, key))][:200]
    return found


def sign_metrics(run: Path) -> None:
    """Make the last checkpoint agree with the metrics."""
    content = (run / "metrics.jsonl").read_bytes()
    mark = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    for path in run.glob("checkpoints/step-*/state.pt"):
        state = torch.load(path, weights_only=True)
        save_state(path, {**state, "metrics": mark})


def sign(path: Path) -> None:
    """Make the manifest beside a file agree with it."""
    manifest = path.parent / "manifest.json"
    data = json.loads(manifest.read_text())
    content = path.read_bytes()
    data["files"][path.name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.write_text(json.dumps(data))


def sign_anew(path: Path, outside: Path, choose: random.Random, files: list[Path]) -> str:
    way = choose.choice((replace_whole, cut, flip, overwrite))
    way(path, outside, choose, files)
    sign(path)
    return way.__name__


def save_state(path: Path, state: Any) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path.write_bytes(buffer.getvalue())
    sign(path)


class Trap:
    """What an attacker would put into a pickle."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.abort, ()


def edit_state(path: Path, outside: Path, choose: random.Random, files: list[Path]) -> str:
    """Change one place of the pickled state, as somebody would who knows how it is made."""
    state = torch.load(path, weights_only=True)
    laughs: list[Any] = []
    for _ in range(40):
        laughs = [laughs, laughs]
    strange = [
        *(torch.zeros(3), torch.tensor(float("nan")), torch.zeros(1).expand(10**12), torch.zeros(2, device="meta")),
        *(torch.tensor(3), torch.zeros(2).to_sparse(), Trap(), laughs, {1: 2}, (), "x", None, -1, 10**12),
    ]
    places = [item for item in walk_state(state, ()) if item[0]]
    where, _ = choose.choice(places)
    owner = state
    for key in where[:-1]:
        owner = owner[key]
    value = choose.choice(strange)
    if choose.random() < 0.2:
        del owner[where[-1]]
        value = "removed"
    else:
        owner[where[-1]] = value
    save_state(path, state)
    return f"{where} -> {type(value).__name__}"


def walk_state(data: Any, where: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], Any]]:
    items: Any = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    found = []
    for key, value in items:
        found.append(((*where, key), value))
        if not isinstance(value, Tensor):
            found += walk_state(value, (*where, key))[:60]
    return found


def compress(path: Path, outside: Path, choose: random.Random, files: list[Path]) -> str:
    """The same archive, deflated, with a file that grows to a thousand times its size."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.namelist():
            content = old.read(item)
            new.writestr(item, bytes(50_000_000) if item.endswith("/data/0") else content)
    path.write_bytes(buffer.getvalue())
    sign(path)
    return ""
