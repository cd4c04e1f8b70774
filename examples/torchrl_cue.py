"""A policy that must remember: TorchRL, a custom environment, RUMModule and REINFORCE.

The first observation of an episode shows a cue; a few blank steps later the action must name it. Without memory the
reward is 0.5 on average.

    pip install "torchrum[rl]"
    python examples/torchrl_cue.py
"""

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import nn
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs import Compose, EnvBase, InitTracker, TransformedEnv
from torchrl.modules import set_recurrent_mode

from torchrum import RUM
from torchrum.rl import RUMModule

DELAY = 5


class CueEnv(EnvBase):
    """Observation ``(3,)``: the cue as one-hot at the first step, then a blank; reward 1 for naming it at the end."""

    def __init__(self, batch_size: int) -> None:
        super().__init__(batch_size=[batch_size])
        shape = (batch_size,)
        self.observation_spec = Composite(observation=Unbounded((*shape, 3)), shape=shape)
        self.action_spec = Categorical(2, shape=shape, dtype=torch.int64)
        self.reward_spec = Unbounded((*shape, 1))

    def _reset(self, tensordict: TensorDict | None = None) -> TensorDict:
        begins = torch.ones(self.batch_size, dtype=torch.bool)
        if tensordict is not None and tensordict.get("_reset", None) is not None:  # only the episodes that have ended
            begins = tensordict["_reset"].squeeze(-1)
        self.cue = torch.where(begins, torch.randint(2, self.batch_size), getattr(self, "cue", 0))
        self.time = torch.where(begins, 0, getattr(self, "time", 0))
        return self._observe()

    def _step(self, tensordict: TensorDict) -> TensorDict:
        self.time = self.time + 1
        done = (self.time >= DELAY).unsqueeze(-1)
        right = (tensordict["action"] == self.cue).unsqueeze(-1)
        return self._observe().update({"reward": (right & done).float(), "done": done, "terminated": done})

    def _observe(self) -> TensorDict:
        shown = nn.functional.one_hot(torch.where(self.time == 0, self.cue, 2), 3)
        return TensorDict({"observation": shown.float()}, batch_size=self.batch_size)

    def _set_seed(self, seed: int | None) -> None:
        torch.manual_seed(0 if seed is None else seed)


def main(updates: int = 60, episodes: int = 64) -> float:
    """Train and return the mean reward of the last updates; 1 is perfect."""
    torch.manual_seed(0)
    memory = RUMModule(RUM(3, 32, batch_first=True))
    head = TensorDictModule(nn.Linear(32, 2), in_keys=["features"], out_keys=["logits"])
    draw = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=torch.distributions.Categorical)
    policy = TensorDictSequential(memory, head, draw)
    env = TransformedEnv(CueEnv(episodes), Compose(InitTracker(), memory.make_tensordict_primer()))
    optimizer, rewards = torch.optim.Adam(policy.parameters(), 1e-2), []
    for _ in range(updates):
        with torch.no_grad():  # two episodes in a row: the second one starts in the middle of the trajectory
            data = env.rollout(2 * DELAY, policy, break_when_any_done=False)
        reward, last = data["next", "reward"].squeeze(-1), data["next", "done"].squeeze(-1)
        with set_recurrent_mode(True):
            logits = TensorDictSequential(memory, head)(data.select("observation", "is_init"))["logits"]
        chosen = torch.distributions.Categorical(logits=logits).log_prob(data["action"])
        loss = -((reward - 0.5) * chosen)[last].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rewards.append(reward[last].mean().item())
    return sum(rewards[-5:]) / 5


if __name__ == "__main__":
    print(f"mean reward {main():.2f} (0.5 without memory)")
