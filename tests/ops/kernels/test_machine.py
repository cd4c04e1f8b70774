"""A CPU that announces AMX without granting it: found out by a trial, and said in words."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchrum import RUM
from torchrum.ops.kernels import machine
from torchrum.ops.kernels.machine import (
    AMX_ADVICE,
    AMX_SYMPTOM,
    ISA_VARIABLE,
    WITHOUT_AMX,
    announces_amx,
    bf16_works,
    limit_isa,
)


@pytest.mark.parametrize(
    "environment, announced, works, limited",
    [
        ({}, True, False, True),
        ({}, True, True, False),
        ({}, False, False, False),
        ({ISA_VARIABLE: "AVX2"}, True, False, False),
    ],
    ids=["ungranted", "granted", "no AMX", "the user's own limit"],
)
def test_the_limit_is_set_where_a_trial_fails(environment, announced, works, limited):
    before = dict(environment)
    said = limit_isa(environment, lambda: announced, lambda: works)
    assert environment == ({ISA_VARIABLE: WITHOUT_AMX} if limited else before)
    assert (said is not None) is limited
    assert not limited or f"{ISA_VARIABLE}={WITHOUT_AMX}" in said


def test_no_trial_is_made_without_need():
    """A child that imports torch takes seconds."""
    limit_isa({}, lambda: False, lambda: pytest.fail("tried"))
    limit_isa({ISA_VARIABLE: "ALL"}, lambda: True, lambda: pytest.fail("tried"))


def test_the_announcement_is_read(tmp_path):
    listing = tmp_path / "cpuinfo"
    assert not announces_amx(listing)
    listing.write_text("flags : avx512f amx_bf16 amx_tile\n")
    assert announces_amx(listing)
    listing.write_text("flags : avx512f\n")
    assert not announces_amx(listing)


@pytest.mark.parametrize("crash, works", [("import os; os.abort()", False), ("raise RuntimeError", False), ("", True)])
def test_the_trial_outlives_its_child(monkeypatch, crash, works):
    monkeypatch.setattr(machine, "AMX_TRIAL", crash)
    assert bf16_works() is works


def test_the_suite_runs_under_the_limit():
    """pytest sets it when it reads conftest.py, before the first matmul, and says so; its workers inherit it."""
    code = (
        "import os\nfrom torchrum.ops.kernels import machine\n"
        "machine.limit_isa.__defaults__ = (os.environ, lambda: True, lambda: False)\n"
        f"import conftest\nassert os.environ[{ISA_VARIABLE!r}] == {WITHOUT_AMX!r}\n"
    )
    clean = {name: value for name, value in os.environ.items() if name not in (ISA_VARIABLE, "PYTEST_XDIST_WORKER")}
    clean["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    ran = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{ISA_VARIABLE}={WITHOUT_AMX}" in ran.stdout


def test_a_failing_matmul_says_what_to_do(monkeypatch):
    def fails(*_):
        raise RuntimeError(AMX_SYMPTOM)

    monkeypatch.setattr(machine.F, "linear", fails)
    with pytest.raises(RuntimeError, match=f"{AMX_SYMPTOM}: {AMX_ADVICE}"):
        RUM(3, 4, form="paper", dtype=torch.bfloat16)(torch.zeros(2, 1, 3, dtype=torch.bfloat16))


def test_other_errors_pass_as_they_are(monkeypatch):
    def fails(*_):
        raise RuntimeError("another one")

    monkeypatch.setattr(machine.F, "linear", fails)
    with pytest.raises(RuntimeError, match=r"^another one$"):
        RUM(3, 4, form="paper", backend="torch")(torch.zeros(2, 1, 3))
