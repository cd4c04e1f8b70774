"""The notebooks run from top to bottom, without Jupyter: their code cells are plain Python."""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[str]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason='it draws: pip install "torchrum[train]"')
    pyplot.switch_backend("agg")
    monkeypatch.setattr(pyplot, "show", pyplot.close)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for number, code in enumerate(cells(path, "code")):
        exec(compile(code, f"{path.name}, code cell {number}", "exec"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_committed_without_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert [cell for cell in notebook["cells"] if cell.get("outputs") or cell.get("execution_count")] == []
    assert cells(path, "markdown")[0].startswith("# ")


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["stream", "swap_your_gru", "watch_a_memory"]
