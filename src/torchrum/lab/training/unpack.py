"""Tensors and plain data from bytes that anyone may have written: no code is run, and nothing inflates."""

import io
import zipfile
from typing import Any

import torch
from torch import Tensor

MAX_DEPTH = 32
"""Of lists, tuples and dictionaries inside each other."""
SPREAD = 16
"""A tensor may take this many times the memory that its file does: the same numbers may stand for several rows."""


def unpack(content: bytes) -> Any:
    """What ``torch.save`` packed, on the CPU; a ValueError says what is wrong with other content."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            items = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, OSError) as error:
        raise ValueError(f"it is not an archive: {error}") from error
    whole = sum(item.file_size for item in items)
    if whole > len(content) or any(item.compress_type != zipfile.ZIP_STORED for item in items):
        raise ValueError("its archive is compressed, which torch never does: it could grow without end")
    try:
        data = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged pickle makes its reader do
        raise ValueError(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.200}") from error
    _check_size(data, len(content))
    return data


def _check_size(data: Any, size: int) -> None:
    """Refuse data that hold more than a file of ``size`` bytes can: the same list or tensor over and over again."""
    budget, numbers = size, SPREAD * size
    level, depth = [data], 0
    while level:
        budget, depth = budget - len(level), depth + 1
        if budget < 0 or depth > MAX_DEPTH:
            raise ValueError("its data is nested too deep, or too many times")
        for value in level:
            if isinstance(value, Tensor):
                if value.device.type != "cpu" or value.layout is not torch.strided or value.is_quantized:
                    raise ValueError("it has a tensor that is not a plain tensor")
                numbers -= value.numel() * value.element_size()
        if numbers < 0:
            raise ValueError("its tensors claim more numbers than the file holds")
        level = [inner for value in level for inner in _inner(value)]


def _inner(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return [*value] if isinstance(value, list | tuple | set | frozenset) else []
