"""How the package is laid out: imports go one way, parameters are few, the way to a launch is short."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_stack

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

import torchrum
from torchrum.ops.rum_scan import native, stepwise
from torchrum.ops.rum_scan.designs import DESIGNS

PACKAGE = Path(torchrum.__file__).parent
ROOT = Path(__file__).parents[1]
ORDER = "ops cells layers export rl models data tasks training recipes ledger plots bench report hub cli".split()
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
    folder.name
    for folder in (PACKAGE / "ops").iterdir()
    if (folder / "__init__.py").is_file() and folder.name != "kernels"
)


def foreign_imports(path: Path, source: str) -> list[tuple[str, list[str]]]:
    """What a file in ops imports of another operator or of kernels: the module behind ``ops``, and the names."""
    others, found = {*OPERATORS, "kernels"} - {path.relative_to(PACKAGE).parts[1]}, []
    for module, names in imported(path, source):
        if module == ["ops"]:  # from torchrum.ops import rotation
            found += [(name, []) for name in names if name in others]
        elif module[:1] == ["ops"] and module[1] in others:
            found.append((".".join(module[1:]), names))
    return found


def check_operator_imports(path: Path, source: str) -> None:
    here = path.relative_to(PACKAGE / "ops").parts[0]
    for module, names in foreign_imports(path, source):
        if module.startswith("kernels"):
            continue
        assert here != "kernels", f"kernels imports the operator {module}"
        operator = importlib.import_module(f"torchrum.ops.{module.split('.')[0]}")
        assert "." not in module, f"{here} imports the inside of another operator: {module}"
        assert set(names) <= set(operator.__all__), f"{here} imports {names} of {module}, which are not public there"


@pytest.mark.parametrize(
    "path",
    sorted(path for path in (PACKAGE / "ops").rglob("*.py") if path.parent != PACKAGE / "ops"),
    ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_operators_import_only_what_is_public_of_each_other(path):
    check_operator_imports(path, path.read_text())


@pytest.mark.parametrize(
    "path, line",
    [
        ("lstm_scan/reference.py", "from ..rum_scan.reference import rum_scan_reference"),
        ("lstm_scan/fused/scan.py", "from torchrum.ops.rum_scan.designs import DESIGNS"),
        ("lstm_scan/fused/scan.py", "import torchrum.ops.rum_scan.designs"),
        ("lstm_scan/reference.py", "from ..rum_scan import DESIGNS"),
        ("kernels/masks.py", "from ..rum_scan import RumOptions"),
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


MOST_PARAMETERS = 8
MANY_PARAMETERS = {  # functions that construct a layer or a cell, with torch.nn's words
    "cells/fast_slow.py": {"fast_slow"},
}


def parameters(function: ast.FunctionDef) -> int:
    named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len(named) - (bool(named) and named[0].arg in ("self", "cls"))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_functions_have_at_most_eight_parameters(path):
    """What several functions need together travels as one NamedTuple. Kernels and public constructors are apart."""
    place = path.relative_to(PACKAGE)
    constructs = place.parts[0] in ("cells", "layers", "models")
    allowed = {*(["__init__"] if constructs else []), *MANY_PARAMETERS.get(place.as_posix(), ())}
    long = {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and parameters(node) > MOST_PARAMETERS
        and not any(ast.unparse(decorator).startswith(("triton.jit", "gluon.jit")) for decorator in node.decorator_list)
    }
    assert long <= allowed, f"more than {MOST_PARAMETERS} parameters"
    assert allowed - {"__init__"} <= long, "this one needs no exception any more"


README = PACKAGE / "ops" / "rum_scan" / "README.md"


def read_paths() -> dict[str, tuple[list[str], list[str]]]:
    """The names and the files from RUM.forward to a launch that the scan's README lists, for each design."""
    section = README.read_text().partition("## From RUM.forward to a launch")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ") and "`" in line]
    first = [row for row in rows if len(row) == 2]
    shared = [[re.findall("`([^`]+)`", row[column])[0] for row in first] for column in (0, 1)]
    return {
        row[0].strip(): tuple(
            common + re.findall("`([^`]+)`", cell) for common, cell in zip(shared, row[1:], strict=True)
        )
        for row in rows
        if len(row) == 3
    }


def test_the_way_from_the_layer_to_a_launch_is_short_and_true():
    paths = read_paths()
    assert set(paths) == {design.name for design in DESIGNS}
    for design, (names, files) in paths.items():
        assert len(names) <= 8 and len(files) + 1 <= 8, design  # and designs.py, where the choice is made
        sources = [(PACKAGE / file).read_text() for file in files]  # each exists
        for name in names:
            *owner, function = name.split(".")
            wanted = [f"def {function}(", *(f"class {part}" for part in owner)]
            assert any(all(word in source for word in wanted) for source in sources), f"{design}: {name} is in no file"


@pytest.mark.parametrize("form", ["batch", "row", "packed"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("design", ["native", "torch", "stepwise"])
def test_a_call_takes_the_way_that_is_listed(design, gradients, layers, form, monkeypatch):
    """Each name is called by the one before it, with nothing of the package between but a name's own decorator. Without
    a GPU Triton's interpreter runs stepwise; how deep the launches on a GPU are, tests/ops/test_plain.py counts."""
    if design == "native" and (obstacle := native.build_obstacle(False)) is not None:
        pytest.skip(f"the native scan cannot run: {obstacle}")
    if design == "stepwise":
        pytest.importorskip("triton")
        monkeypatch.setattr(stepwise, "obstacle", lambda *_: None)
    names, _ = read_paths()[design]
    if gradients:
        names.insert(names.index("plain_scan") + 1, "_PlainScan.forward")
    else:
        names = ["infer_projecting" if name == "forward_projecting" else name for name in names]
    device = "cuda" if design == "stepwise" and torch.cuda.is_available() else "cpu"
    layer, stacks = torchrum.RUM(4, 5, num_layers=layers, backend=design, device=device), []
    x = torch.randn(1, 4, device=device)
    x = {"batch": x.unsqueeze(1), "row": x, "packed": pack_sequence([x])}[form]

    def watch(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            codes = [part.f_code for part, _ in walk_stack(frame)][::-1]
            stacks.append([code.co_qualname for code in codes if code.co_filename.startswith(str(PACKAGE))])

    before = sys.getprofile()
    with torch.set_grad_enabled(gradients):
        sys.setprofile(watch)
        layer(x)
        sys.setprofile(before)
    (way, *_) = [stack for stack in stacks if [name for name in stack if "<locals>" not in name] == names] or [[]]
    assert 0 < len(way) <= 8, (names, way, max(stacks, key=len))


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
