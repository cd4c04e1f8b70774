"""What would be released: wheel and sdist, their contents and metadata, and the wheel in use."""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from sharing import made_once
from torchrum import __version__

ROOT = Path(__file__).parents[1]
FIRST = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
SENSITIVE = re.compile(
    r"(^|/)(\.env|\.git|\.venv|runs|__pycache__|\.mypy_cache|docs/_build)(/|$)|\.(pyc|safetensors|pt)$"
)


def run(*command: str, **changes: str) -> str:
    """Run Python away from the repository; its output, or its complaint."""
    environment = {**os.environ, **changes}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both archives, built as a release would build them."""
    pytest.importorskip("hatchling", reason="building needs: pip install --group test")

    def build(folder: Path) -> None:
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr

    return made_once(tmp_path_factory, "dist", build)


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"torchrum-{__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        return Parser().parsestr(file.read(f"torchrum-{__version__}.dist-info/METADATA").decode())


def test_the_wheel_has_the_whole_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        packed = {name for name in file.namelist() if ".dist-info/" not in name}
    package = ROOT / "src"
    wanted = {str(path.relative_to(package)) for path in package.rglob("*") if path.is_file()}
    assert packed == {name for name in wanted if "__pycache__" not in name}
    assert "torchrum/py.typed" in packed
    assert "torchrum/lab/page/assets/page.html" in packed
    assert any(name.startswith("torchrum/lab/trained/alice/checkpoints/step-") for name in packed)


def test_the_sdist_has_what_its_tests_and_targets_need(dist: Path) -> None:
    with tarfile.open(dist / f"torchrum-{__version__}.tar.gz") as file:
        packed = {name.partition("/")[2] for name in file.getnames()}
    wanted = ("pyproject.toml", "Makefile", "constraints.txt", "README.md", "CHANGELOG.md", "LICENSE", "CITATION.cff")
    assert {
        *wanted,
        "docs/conf.py",
        "tests/test_release.py",
        "results/README.md",
        ".github/workflows/tests.yml",
    } <= packed
    assert not [name for name in packed if SENSITIVE.search(name) and "/lab/trained/" not in name]


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "torchrum"
    assert metadata["Version"] == __version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "MIT"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Description-Content-Type"] == "text/markdown"
    needed = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert [re.split(r"[<>=]", text)[0] for text in needed] == ["torch"]  # the layers need torch alone
    assert {"train", "export"} <= set(metadata.get_all("Provides-Extra", []))


def test_the_changelog_and_the_citation_agree_with_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "\n## [Unreleased]\n" in text or f"\n## [{__version__}] - " in text
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited is None or cited[1] == __version__


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in a folder of its own, without its dependencies."""
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target"]
    return made_once(
        tmp_path_factory, "installed", lambda folder: run("-m", "pip", "install", *options, str(folder), str(wheel))
    )


COMMAND = """
import runpy, sys
import torchrum
print(torchrum.__file__)
sys.argv = ["torchrum", "--version"]
runpy.run_module("torchrum", run_name="__main__")
"""


def test_the_installed_wheel_runs_the_first_snippet_and_the_command(installed: Path, tmp_path: Path) -> None:
    assert FIRST is not None
    script = tmp_path / "snippet.py"
    script.write_text(FIRST[1] + COMMAND)
    where, version = run(str(script), PYTHONPATH=str(installed)).split()
    assert Path(where).is_relative_to(installed)
    assert version == __version__
    assert "[console_scripts]" in next(installed.glob("*.dist-info/entry_points.txt")).read_text()


SNIPPET = """
import torch
from torchrum import RUM, RUMCell, rotate

rum = RUM(10, 32, num_layers=2, eta=1.0)
output, h_n = rum(torch.randn(5, 3, 10))
angle: str = rotate(torch.ones(3), torch.ones(3), torch.ones(3))  # wrong: a Tensor
cell = RUMCell(10, 20, lam="one")  # wrong: a number
RUM(10, 20, forget_bias=1.0)  # wrong: no such argument
"""


@pytest.mark.slow
def test_a_users_code_is_type_checked(installed: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="type checking needs: pip install --group lint")
    script = tmp_path / "snippet.py"
    script.write_text(SNIPPET)
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--ignore-missing-imports", str(script)]
    done = subprocess.run(
        [*command, "--cache-dir", str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(installed), "PYTHONPATH": ""},
        timeout=600,
    )
    wrong = [int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line]
    assert wrong == [7, 8, 9], done.stdout


@pytest.mark.slow
def test_the_wheel_installs_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """With every dependency from the package index; needs a network and minutes."""
    run("-m", "venv", str(tmp_path / "env"))
    python = str(tmp_path / "env" / "bin" / "python")
    assert FIRST is not None
    (tmp_path / "snippet.py").write_text(FIRST[1])
    for command in (["-m", "pip", "install", "--quiet", str(wheel)], [str(tmp_path / "snippet.py")]):
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run([python, *command], capture_output=True, text=True, cwd=tmp_path, timeout=1200, env=clean)
        assert done.returncode == 0, done.stderr


def test_the_build_backend_is_pinned() -> None:
    """To the versions that are tested here; without hashes, since builds of torch differ between indexes."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pinned = set((ROOT / "constraints.txt").read_text().split())
    assert {text.partition("==")[0] for text in needed} >= {"hatchling", "packaging", "pathspec", "pluggy"}
    assert set(needed) <= pinned
