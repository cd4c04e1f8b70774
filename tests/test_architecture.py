"""The layout of the package: imports go one way."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchrum

PACKAGE = Path(torchrum.__file__).parent
ROOT = Path(__file__).parents[1]
ORDER = "ops cells layers export rl lab hub paper cli".split()
RANK = {name: place for place, name in enumerate(ORDER)}


def imported(path: Path, source: str) -> Iterator[tuple[list[str], list[str]]]:
    """What a file imports of the package: the parts of a module's name behind ``torchrum``, and the names from it."""
    package = path.relative_to(PACKAGE).parts[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name.split(".") for alias in node.names]
            yield from ((module[1:], []) for module in modules if module[0] == "torchrum")
        elif isinstance(node, ast.ImportFrom):
            module, names = node.module.split(".") if node.module else [], [alias.name for alias in node.names]
            if node.level > 0:
                yield [*package[: len(package) - node.level + 1], *module], names
            elif module[0] == "torchrum":
                yield module[1:], names


def imports_of(path: Path) -> list[str]:
    """Top folders of the package that a file imports."""
    return [folder for module, names in imported(path, path.read_text()) for folder in (module[:1] or names)]


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
    assert "layers" in imports_of(bad)


OPERATORS = sorted(
    path.stem
    for path in (PACKAGE / "ops").iterdir()
    if ((path / "__init__.py").is_file() and path.name != "kernels") or re.fullmatch("[a-z]\\w*\\.py", path.name)
)


def foreign_imports(path: Path, source: str) -> list[tuple[str, list[str]]]:
    """What a file in ops imports of another operator or of kernels: the module behind ``ops``, and the names."""
    others, found = {*OPERATORS, "kernels"} - {Path(path.relative_to(PACKAGE).parts[1]).stem}, []
    for module, names in imported(path, source):
        if module == ["ops"]:  # from torchrum.ops import rotation
            found += [(name, []) for name in names if name in others]
        elif module[:1] == ["ops"] and module[1] in others:
            found.append((".".join(module[1:]), names))
    return found


def check_operator_imports(path: Path, source: str) -> None:
    here = Path(path.relative_to(PACKAGE / "ops").parts[0]).stem
    for module, names in foreign_imports(path, source):
        if module.startswith("kernels"):
            continue
        assert here != "kernels", f"kernels imports the operator {module}"
        operator = importlib.import_module(f"torchrum.ops.{module.split('.')[0]}")
        assert "." not in module, f"{here} imports the inside of another operator: {module}"
        assert set(names) <= set(operator.__all__), f"{here} imports {names} of {module}, which are not public there"


@pytest.mark.parametrize(
    "path",
    sorted((PACKAGE / "ops").rglob("*.py")),
    ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_operators_import_only_what_is_public_of_each_other(path):
    check_operator_imports(path, path.read_text())


@pytest.mark.parametrize(
    "path, line",
    [
        ("fast_slow_scan/reference.py", "from ..rum_scan.reference import rum_scan_reference"),
        ("fast_slow_scan/fused.py", "from torchrum.ops.rum_scan.designs import DESIGNS"),
        ("fast_slow_scan/fused.py", "import torchrum.ops.rum_scan.designs"),
        ("fast_slow_scan/reference.py", "from ..rum_scan import DESIGNS"),
        ("kernels/masks.py", "from ..rum_scan import RumOptions"),
        ("orthogonal_power.py", "from torchrum.ops.rotation import polar"),
    ],
)
def test_the_rule_for_operators_can_fail(path, line):
    with pytest.raises(AssertionError):
        check_operator_imports(PACKAGE / "ops" / path, line)


def test_every_shared_kernel_file_is_introduced():
    """The docstring of ops/kernels says what each file is for, and names none that is gone."""
    folder = PACKAGE / "ops" / "kernels"
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert {path.stem for path in folder.glob("*.py")} - {"__init__"} == set(re.findall("``(\\w+)``", text))


IMPORTS = """
import sys, torch
before = {*sys.modules}
import torchrum
heavy = {"triton", "torch.onnx", "torch._dynamo", "torch.utils.flop_counter"} & {*sys.modules} - before
assert not heavy, heavy
torch.ops.torchrum.rum_scan, torch.ops.torchrum.rotation_phases

import torchrum.lab.training.config as config
built = []
for kind in (config.TrainConfig, config.ModelConfig, config.OptimizerConfig, config.Paper):
    kind.__post_init__ = lambda self: built.append(self)
from torchrum.lab.recipes import RECIPES
RECIPES["recall-lstm-t30"]
assert not built, built
"""


def test_an_import_does_little():
    """It loads nothing that takes long, registers the operators that exported programs name, and builds no config."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_declared_dependencies_are_used():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = [text for texts in project["project"]["optional-dependencies"].values() for text in texts]
    declared = {re.split(r"[<>=\[]", text)[0] for text in (*extras, *project["dependency-groups"]["test"])}
    files = [path for folder in ("src", "tests", "examples") for path in (ROOT / folder).rglob("*.py")]
    code = "".join(path.read_text() for path in files)
    plugins = {"torchrum", "pytest-xdist"}  # the extra of all extras; a plugin that the Makefile turns on
    assert not [name for name in sorted(declared - plugins) if name.replace("-", "_") not in code]


def test_public_names_are_there():
    assert all(hasattr(torchrum, name) for name in torchrum.__all__)
