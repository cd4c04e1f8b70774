"""CUDA kernels compiled as plain C++."""

import os
import subprocess
from pathlib import Path


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
