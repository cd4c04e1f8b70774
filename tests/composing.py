"""A cell's scan inside what PyTorch builds around modules."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def assert_composes(cell, x: Tensor, state) -> None:
    """``cell.scan`` has the same gradients compiled, checkpointed and, in evaluation, under ``torch.func.grad``."""

    def gradient(run) -> Tensor:
        torch.manual_seed(4)
        leaf = x.clone().requires_grad_()
        (2 * run(leaf)).sum().backward()
        return leaf.grad

    wanted = gradient(lambda x: cell.scan(x, state)[0])
    compiled = torch.compile(lambda x: cell.scan(x, state)[0], backend="eager")
    torch.testing.assert_close(gradient(compiled), wanted)
    kept = gradient(lambda x: checkpoint(lambda x: cell.scan(x, state)[0], x, use_reentrant=False))
    torch.testing.assert_close(kept, wanted)
    cell.eval()
    plain = gradient(lambda x: cell.scan(x, state)[0])
    torch.testing.assert_close(torch.func.grad(lambda x: 2 * cell.scan(x, state)[0].sum())(x), plain)
