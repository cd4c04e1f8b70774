"""The examples for other people's packages run and reach what they are written for; absent packages are skipped."""

import importlib.util
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "examples"
PACKAGES = {
    "accelerate_loop": ("accelerate",),
    "captum_attribution": ("captum", "torchinfo"),
    "darts_forecast": ("darts",),
    "lightning_forecast": ("pytorch_lightning", "onnxruntime", "onnxscript"),
    "opacus_private": ("opacus",),
    "skorch_search": ("skorch", "sklearn"),
    "torchrl_cue": ("torchrl",),
    "transformers_trainer": ("transformers", "accelerate"),
}


def load(name: str):
    """The example as a module; skips where a package is absent."""
    for package in PACKAGES[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"the example needs the package {package}, which is not installed")
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run():
    assert sorted(PACKAGES) == sorted(path.stem for path in FOLDER.glob("*.py"))


def test_accelerate():
    first, last = load("accelerate_loop").main()
    assert last < 0.75 * first


def test_captum_and_torchinfo():
    decisive, completeness, parameters = load("captum_attribution").main()
    assert decisive == 0
    assert completeness < 1e-4
    assert parameters == 3 * 16 * 1 + 2 * 16 * 16 + 3 * 16 + 16 + 1


def test_darts():
    assert load("darts_forecast").main() < 0.2  # the mean of |sin| is 0.64


@pytest.mark.slow
def test_lightning():
    loss, difference = load("lightning_forecast").main()
    assert loss < 0.25  # the variance is 0.5
    assert difference < 1e-5


def test_opacus_takes_exact_per_sample_gradients():
    example = load("opacus_private")
    model, x, y = example.Classifier().double(), torch.randn(5, 9, 4).double(), torch.tensor([0, 1, 1, 0, 1])
    each = example.per_sample_gradients(model, x, y)
    for place in range(5):
        loss = torch.nn.functional.cross_entropy(model(x[place : place + 1]), y[place : place + 1])
        expected = dict(zip(each, torch.autograd.grad(loss, list(model.parameters())), strict=True))
        torch.testing.assert_close({name: part[place] for name, part in each.items()}, expected)
    accuracy, epsilon = example.main()
    assert accuracy > 0.65
    assert 0 < epsilon < 20


@pytest.mark.slow
def test_skorch():
    accuracy, best = load("skorch_search").main()
    assert accuracy > 0.6
    assert best["max_epochs"] == 2


def test_torchrl():
    assert load("torchrl_cue").main(updates=40) > 0.9


def test_transformers_trainer():
    before, after = load("transformers_trainer").main()
    assert after < 0.3 * before
