"""CUDA kernels compiled as plain C++; pytest's workers share what one of them has compiled."""

import os
import subprocess
from pathlib import Path

import pytest


def shared_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """A folder for one run of the tests, the same for all of its workers."""
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    folder.mkdir(exist_ok=True)
    return folder


def compile_cpp(library: Path, source: str, macros: tuple[tuple[str, int], ...], *flags: str) -> Path:
    """Compile ``source`` with g++, unless ``library`` is there already."""
    if not library.exists():
        text, part = (library.with_suffix(f".{os.getpid()}.{suffix}") for suffix in ("cpp", "so"))
        text.write_text(source)
        defines = [f"-D{key}={value}" for key, value in macros]
        command = ["g++", "-std=c++14", "-O1", "-w", "-shared", "-fPIC", *defines, *flags, str(text), "-o", str(part)]
        subprocess.run(command, check=True)
        part.replace(library)  # whole or not there
    return library
