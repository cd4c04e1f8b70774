"""A RUM in a TorchRL policy; needs ``pip install "torchrum[rl]"``."""

from typing import Any

import torch
from torch import Tensor

try:
    from tensordict import TensorDictBase
    from tensordict.nn import TensorDictModuleBase, dispatch
    from torchrl.data import Unbounded
    from torchrl.modules.tensordict_module.rnn import recurrent_mode
except ImportError as error:
    raise ImportError('torchrum.rl needs TorchRL. Run: pip install "torchrum[rl]"') from error

from torchrum.layers.rum import RUM
from torchrum.ops._checks import ArgumentTypeError

__all__ = ["RUMModule"]


class RUMModule(TensorDictModuleBase):
    """A RUM between a policy's observation and its head, used like :class:`torchrl.modules.GRUModule`.

    By default each call is one step, with the state in the tensordict. In recurrent mode, inside
    :class:`torchrl.modules.set_recurrent_mode`, a call runs whole trajectories whose last batch dimension is time. If
    ``is_init`` is true, a row starts again, even in the middle of a trajectory, as by ``reset=`` of the layer.

    Args:
        rum: a RUM with ``batch_first=True``, in one direction; available as ``module.rum``.
        in_key, out_key: keys of the input ``(*batch, I)`` and of the output ``(*batch, H)``.
        state_key: key of h ``(*batch, num_layers, H)``. If lam is not 0, R ``(*batch, num_layers, H, H)`` has this key
            followed by ``_R``.
        default_recurrent_mode: the mode if no ``set_recurrent_mode`` is active.

    Example::

        module = RUMModule(RUM(4, 64, batch_first=True), in_key="observation", out_key="features")
        env = TransformedEnv(env, Compose(InitTracker(), module.make_tensordict_primer()))
        policy = TensorDictSequential(module, head)
        data = env.rollout(100, policy)
        with set_recurrent_mode(True):
            policy(data)
    """

    def __init__(
        self,
        rum: RUM,
        *,
        in_key: Any = "observation",
        out_key: Any = "features",
        state_key: str = "recurrent_state",
        default_recurrent_mode: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(rum, RUM):
            raise ArgumentTypeError(f"RUMModule: rum is a {type(rum).__name__}; it must be a torchrum.RUM.")
        if not rum.batch_first or rum.bidirectional:
            raise ValueError(
                f"RUMModule: rum has batch_first={rum.batch_first} and bidirectional={rum.bidirectional}; "
                "a policy needs batch_first=True and one direction."
            )
        self.rum = rum
        self.state_keys = [state_key, f"{state_key}_R"][: len(rum.state_names)]
        self.in_keys = [in_key, *self.state_keys, "is_init"]
        self.out_keys = [out_key, *(("next", key) for key in self.state_keys)]
        self.default_recurrent_mode = default_recurrent_mode

    @property
    def recurrent_mode(self) -> bool:
        """Whether a call runs whole trajectories."""
        asked = recurrent_mode()
        return self.default_recurrent_mode if asked is None else bool(asked)

    def make_tensordict_primer(self) -> Any:
        """Return the transform that adds the entries of the state to an environment's tensordicts."""
        from torchrl.envs import TensorDictPrimer

        layers, H = self.rum.num_layers, self.rum.hidden_size
        shapes = [(layers, H), (layers, H, H)]
        specs = {key: Unbounded(shape=shape) for key, shape in zip(self.state_keys, shapes, strict=False)}
        return TensorDictPrimer(specs, expand_specs=True)

    @dispatch
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the output and the new state; in recurrent mode the state is written at the last step."""
        in_time, shape = self.recurrent_mode, tensordict.shape
        if in_time and not shape:
            raise ValueError(
                "RUMModule: in recurrent mode the last batch dimension is time, and this tensordict has none."
            )
        steps = shape[-1] if in_time else 1
        rows = shape[:-1].numel() if in_time else shape.numel()

        def rowwise(key: Any) -> Tensor | None:
            """Return an entry as ``(rows, steps, ...)``."""
            value = tensordict.get(key, None)
            return None if value is None else value.reshape(rows, steps, *value.shape[len(shape) :])

        x, again = rowwise(self.in_keys[0]), rowwise("is_init")
        if x is None or again is None:
            missing = self.in_keys[0] if x is None else "is_init"
            raise KeyError(
                f"RUMModule: the tensordict has no entry {missing!r}; InitTracker adds is_init to an environment."
            )
        again = again.reshape(rows, steps)
        states = [self._first(rowwise(key)) for key in self.state_keys]
        reset = again if in_time else None
        if not in_time:  # reset the single step here, without reading the value of ``again`` on the host
            states = [self._or_initial(place, part, again[:, 0], x) for place, part in enumerate(states)]
        hx = None if states[0] is None else states[0] if len(states) == 1 else tuple(states)
        output, hidden = self.rum(x, hx, reset=reset)
        tensordict.set(self.out_keys[0], output.reshape(*shape, -1))
        for key, part in zip(self.out_keys[1:], hidden if isinstance(hidden, tuple) else (hidden,), strict=True):
            last = part.transpose(0, 1).unsqueeze(1)  # (rows, 1, layers, ...)
            before = last.new_zeros(rows, steps - 1, *last.shape[2:])
            tensordict.set(key, torch.cat([before, last], 1).reshape(*shape, *last.shape[2:]))
        return tensordict

    @staticmethod
    def _first(part: Tensor | None) -> Tensor | None:
        """Return the state before the first step, ``(layers, rows, ...)``."""
        return None if part is None else part[:, 0].transpose(0, 1).contiguous()

    def _or_initial(self, place: int, part: Tensor | None, again: Tensor, like: Tensor) -> Tensor | None:
        if part is None:
            return None
        fresh = self.rum.initial_state(0, len(again), like)[place]
        return torch.where(again.view(1, -1, *[1] * (part.dim() - 2)), fresh, part)
