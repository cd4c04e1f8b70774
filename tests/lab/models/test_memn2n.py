"""MemN2N against published numbers, and its training tricks. Tests of models/answering.py."""

import pytest
import torch

from torchrum.lab.models import MemN2N, build_model
from torchrum.lab.models.answering import position_encoding
from torchrum.lab.tasks import Babi
from torchrum.lab.training import ModelConfig

STORY = torch.tensor([[[1, 2, 0], [3, 4, 2], [5, 2, 0]]])  # two sentences and the question

# computed in float64 by two independent programs: the state after three hops, the answer's p[5]
GOLDEN = {
    ("paper", False): ((-0.22363888, 0.07511017, 0.27211397, 0.10083675), 0.18511209),
    ("paper", True): ((-0.09749213, 0.08307768, 0.12553364, -0.02131171), 0.15773452),
    ("code", False): ((-0.90489674, 0.01982816, 0.54402343, 0.12381258), 0.25392056),
    ("code", True): ((-0.62074076, 0.29362964, 0.46648082, -0.10715029), 0.21609064),
}


def wave(start: int, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return 0.5 * torch.sin(torch.arange(start, start + count, dtype=torch.float64)).view(shape)


def golden(position, linear_steps=0) -> MemN2N:
    """Three slots, of which one is empty, and the tables of the published example."""
    model = MemN2N(7, 4, 3, memory_size=3, position=position, linear_steps=linear_steps).double().eval()
    with torch.no_grad():
        for table, start in zip(model.words, (10, 50, 90, 130), strict=True):
            table.weight.copy_(wave(start, 7, 4))
            table.weight[0] = 0
        for table, start in zip(model.ages, (100, 110, 120, 130), strict=True):
            table.weight[:3] = wave(start, 3, 4)
            table.weight[0] = 0
    return model


@pytest.mark.parametrize("position, linear", GOLDEN)
def test_golden_numbers(position, linear):
    state, probability = GOLDEN[position, linear]
    logits = golden(position, linear_steps=1 if linear else 0)(STORY)
    table = golden(position).words[3].weight
    expected = table @ torch.tensor(state, dtype=torch.float64)
    torch.testing.assert_close(logits[0], expected, atol=1e-7, rtol=0)
    assert logits.softmax(-1)[0, 5].item() == pytest.approx(probability, abs=1e-7)


ROWS = {
    "paper": ((0.5833, 0.5, 0.4167, 0.3333), (0.4167, 0.5, 0.5833, 0.6667), (0.25, 0.5, 0.75, 1.0)),
    "code": ((1.5, 1.1667, 0.8333, 0.5), (1.0, 1.0, 1.0, 1.0), (0.5, 0.8333, 1.1667, 1.5)),
}
"""Position encoding of three words in four dimensions, with four digits."""


@pytest.mark.parametrize("form", ROWS)
def test_position_encoding_has_the_published_rows(form):
    torch.testing.assert_close(position_encoding(3, 4, form), torch.tensor(ROWS[form]), atol=5e-5, rtol=0)


def test_padding_and_old_sentences_do_not_matter():
    model = MemN2N(9, 4, 5, memory_size=3).eval()
    x = torch.randint(1, 9, (1, 7, 5))
    padded = torch.cat((x, torch.randint(1, 9, (1, 4, 5))), 1)
    torch.testing.assert_close(model(padded, torch.tensor([7])), model(x))
    older = x.clone()
    older[:, :3] = 1  # three sentences and the question are kept
    torch.testing.assert_close(model(older), model(x))
    newer = x.clone()
    newer[:, 3] = 1
    assert not torch.allclose(model(newer), model(x))


def test_the_blank_stays_zero():
    model = MemN2N(9, 4, 5, memory_size=3)
    model(torch.randint(0, 9, (4, 4, 5))).square().sum().backward()
    assert all(
        not table.weight.grad[0].any() and not table.weight[0].any() for table in (*model.words[:-1], *model.ages)
    )


def test_parameters_are_counted():
    config = ModelConfig(layer="memn2n", hidden_size=20, num_layers=3)
    model = build_model(config, Babi(task=1, reading="sentences"))
    assert sum(parameter.numel() for parameter in model.parameters()) == 4 * (22 + 11) * 20
    x = torch.randint(0, 22, (3, 6, 7))
    model(x).square().sum().backward()
    assert all(parameter.grad.any() for parameter in model.parameters())


def test_linear_start_ends_after_its_steps():
    model = MemN2N(9, 4, 5, memory_size=3, linear_steps=2, noise=0.0)
    x = torch.randint(1, 9, (2, 4, 5))
    first, second, third, fourth = (model(x) for _ in range(4))
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(third, fourth)
    assert not torch.allclose(second, third)
    torch.testing.assert_close(model.eval()(x), fourth)
    assert int(model.updates) == 4  # scoring is no step


def test_relu_acts_after_each_hop():
    plain, x = MemN2N(9, 4, 5, memory_size=3, hops=1).double().eval(), torch.randint(1, 9, (1, 4, 5))
    table = plain.words[1].weight
    u = torch.linalg.lstsq(table, plain(x).t()).solution  # (4, 1), the state behind the answers
    assert (u < 0).any()
    plain.relu = True
    torch.testing.assert_close(plain(x).t(), table @ u.relu())


def test_noisy_ages_keep_their_order_and_have_gaps():
    torch.manual_seed(0)
    model = MemN2N(9, 4, 5, memory_size=50)
    count = torch.tensor([[30]] * 200 + [[80]] * 50 + [[1]] * 50)
    ages = model._noisy_ages(count)
    for row, n in zip(ages, count.flatten().tolist(), strict=True):
        kept = row[: min(n, 50)]
        assert torch.all(kept.diff() > 0) and kept[0] >= 1
        assert kept[-1] <= min(n, 50) + -(-min(n, 50) // 10)
    last = ages[:200, 29]
    assert {30, 31, 32, 33} >= set(last.tolist()) and len(set(last.tolist())) == 4
    assert len(set(ages[200:250, 49].tolist())) == 6  # of a longer story, the sentences that are kept
    x = torch.randint(1, 9, (1, 31, 5))
    assert torch.equal(model.eval()(x), model(x)) and not torch.equal(model.train()(x), model(x))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"position": "odd"}, "position='odd'"),
        ({"noise": 2}, "noise=2 is not allowed; it must be a number from 0 to 1"),
        ({"linear_steps": -1}, "linear_steps=-1 is not allowed; it must be 0 or more"),
        ({"noise": "some"}, "noise='some' is not allowed"),
        ({"memory_size": 0}, "memory_size=0 is not allowed; it must be an integer of at least 1"),
        ({"memory_size": 1.5}, "memory_size=1.5 is not allowed"),
        ({"hops": -1}, "hops=-1 is not allowed"),
        ({"relu": "maybe"}, "relu='maybe'; it must be True or False"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        MemN2N(9, 4, 5, **{"memory_size": 3, **options})
