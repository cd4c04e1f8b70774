import copy
import math

import pytest
import torch

from torchrum.training import OptimizerConfig
from torchrum.training.optim import RMSpropTF, build_optimizer, learning_rate, set_learning_rate


def test_rmsprop_tf_follows_tensorflow_written_in_plain_numbers():
    lr, decay, eps = 0.01, 0.9, 1e-10
    weight = torch.nn.Parameter(torch.tensor([0.5, -2.0, 0.0], dtype=torch.float64))
    optimizer = RMSpropTF([weight], lr=lr, decay=decay, eps=eps)
    values, squares = weight.tolist(), [1.0] * 3  # TensorFlow's slot starts at one
    for step in range(20):
        grads = [math.sin(step + i) * 10.0 ** (i - 1) for i in range(3)]
        weight.grad = torch.tensor(grads, dtype=torch.float64)
        optimizer.step()
        for i, g in enumerate(grads):
            squares[i] = decay * squares[i] + (1 - decay) * g * g
            values[i] -= lr * g / math.sqrt(squares[i] + eps)
    torch.testing.assert_close(weight.detach(), torch.tensor(values, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_rmsprop_tf_differs_from_torch_as_documented():
    first = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    ours, theirs = RMSpropTF(first[:1], lr=0.1), torch.optim.RMSprop(first[1:], lr=0.1, alpha=0.9)
    for parameter, optimizer in zip(first, (ours, theirs), strict=True):
        parameter.grad = torch.full((1,), 1e-3)
        optimizer.step()
    assert abs(first[0].item() - (1 - 0.1 * 1e-3 / math.sqrt(0.9))) < 1e-6  # the ones make the first step small
    assert first[1].item() < 0.7


def test_rmsprop_tf_state_survives_a_round_trip():
    weights = [torch.nn.Parameter(torch.arange(3.0)) for _ in range(2)]
    one, two = (RMSpropTF([weight]) for weight in weights)
    for weight, optimizer in zip(weights, (one, two), strict=True):
        weight.grad = torch.ones(3)
        optimizer.step()
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for weight, optimizer in zip(weights, (one, two), strict=True):
        weight.grad = torch.full((3,), 2.0)
        optimizer.step()
    assert torch.equal(*weights)
    with pytest.raises(ValueError, match=r"decay=1\.5"):
        RMSpropTF(weights, decay=1.5)


def test_rmsprop_tf_leaves_parameters_without_gradient_alone():
    weight = torch.nn.Parameter(torch.ones(2))
    RMSpropTF([weight]).step()
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["adam", "rmsprop", "rmsprop_tf"])
def test_a_tensor_rate_gives_the_steps_of_a_number(name):
    results = []
    for graph in (False, True):
        model = torch.nn.Linear(3, 1)
        torch.nn.init.constant_(model.weight, 0.5)
        torch.nn.init.zeros_(model.bias)
        optimizer = build_optimizer(OptimizerConfig(name=name), model, False, torch.device("cpu"))
        if graph:  # what capture needs, without the flag that only CUDA accepts
            optimizer.param_groups[0]["lr"] = torch.tensor(1e-3)
        for step in range(3):
            set_learning_rate(optimizer, 0.1 / (step + 1))
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        results.append(model.weight.detach().clone())
    torch.testing.assert_close(*results)


def test_learning_rate_warms_up_and_falls():
    config = OptimizerConfig(lr=1.0, warmup=4, milestones=(10, 20), factors=(0.1, 0.01))
    rates = [learning_rate(config, step) for step in (0, 3, 4, 9, 10, 19, 20, 1000)]
    assert rates == [0.25, 1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
