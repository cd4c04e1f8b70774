"""Imports go one way: a folder imports only from folders to its left."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import torchrum

PACKAGE = Path(torchrum.__file__).parent
ROOT = Path(__file__).parents[1]
ORDER = "ops cells layers export rl models data tasks training recipes ledger plots bench report hub cli".split()
RANK = {name: place for place, name in enumerate(ORDER)}


def imports_of(path: Path):
    """Top folders of the package that a file imports."""
    package = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
            yield from (target[1] for target in targets if target[0] == "torchrum" and len(target) > 1)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                target = (node.module or "").split(".")
                if target[0] != "torchrum":
                    continue
                base = tuple(target[1:])
            else:
                base = package[: len(package) - node.level + 1] + tuple(
                    (node.module or "").split(".") if node.module else ()
                )
            yield from [base[0]] if base else [alias.name for alias in node.names]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if here not in RANK:
        assert here in ("__init__", "__main__"), f"{here} has no place in the order of folders"
        return
    for target in imports_of(path):
        if target in RANK and target != here:
            assert RANK[target] < RANK[here], f"{here} imports {target}, which stands to its right"


def test_the_rule_can_fail(monkeypatch):
    """A file in ops that imported a layer would be caught."""
    bad = PACKAGE / "ops" / "_dispatch.py"
    source = bad.read_text() + "\nfrom ..layers.rum import RUM\n"
    monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: source)
    assert "layers" in list(imports_of(bad))


def test_importing_the_package_registers_its_operators():
    """A program saved by torch.export names them, and ``import torchrum`` is what its reader does to have them."""
    code = "import torch, torchrum; torch.ops.torchrum.rum_scan, torch.ops.torchrum.rotation_phases"
    done = subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_declared_dependencies_are_used():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = [text for texts in project["project"]["optional-dependencies"].values() for text in texts]
    declared = {re.split(r"[<>=\[]", text)[0] for text in (*extras, *project["dependency-groups"]["test"])}
    code = "".join(path.read_text() for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py"))
    plugins = {"torchrum", "pytest-xdist"}  # the extra of all extras; a plugin that the Makefile turns on
    assert not [name for name in sorted(declared - plugins) if name.replace("-", "_") not in code]


def test_public_names_are_there():
    assert all(hasattr(torchrum, name) for name in torchrum.__all__)
    assert torchrum.__all__ == sorted(torchrum.__all__)
