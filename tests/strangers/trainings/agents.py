"""Agents, whose weights decide what they see next."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from strangers.table import Made, loader, made, training, vectors


class _Walk:
    """A walker on a line, who wants to the right."""

    def reset(self) -> Tensor:
        self.at = 0.0
        return torch.tensor([self.at, 1.0])

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        self.at += 0.3 if action else -0.3
        return torch.tensor([self.at, 1.0]), self.at, abs(self.at) > 1


@training(weights_choose=True)
def reinforce_with_episodes_as_data() -> Made:
    class Reinforce(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.policy, self.env, self.baseline = (
                nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)),
                _Walk(),
                0.0,
            )

        def episodes(self) -> Any:
            for _ in range(6):
                state, rows, rewards = self.env.reset(), [], []
                for _ in range(6):
                    with torch.no_grad():
                        action = Categorical(logits=self.policy(state)).sample()
                    new, reward, done = self.env.step(int(action))
                    rows.append((state, action))
                    rewards.append(reward)
                    state = new
                    if done:
                        break
                returns = np.cumsum(rewards[::-1])[::-1].copy()
                for (s, a), g in zip(rows, returns, strict=True):
                    yield s, a, torch.tensor(g, dtype=torch.float32)

        def train_dataloader(self) -> Any:
            class Episodes(IterableDataset[Any]):
                def __iter__(_) -> Any:  # noqa: N805
                    return self.episodes()

            return loader(Episodes(), 6, shuffle=False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            s, a, g = batch
            self.baseline = 0.9 * self.baseline + 0.1 * g.mean().item()
            return -(Categorical(logits=self.policy(s)).log_prob(a) * (g - self.baseline)).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-2)

    return made(Reinforce(), None)


@training(weights_choose=True)
def deep_q_learning_with_a_replay_buffer() -> Made:
    class Replay(IterableDataset[Any]):
        def __init__(self, buffer: Any) -> None:
            self.buffer = buffer

        def __iter__(self) -> Any:
            for i in np.random.choice(len(self.buffer), 24):
                yield self.buffer[i]

    class DQN(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.target = (nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)) for _ in range(2))
            self.buffer: deque[Any] = deque(maxlen=50)
            self.env = _Walk()
            self.state = self.env.reset()
            for _ in range(10):
                self.play(1.0)

        @torch.no_grad()
        def play(self, epsilon: float) -> None:
            action = np.random.randint(2) if np.random.random() < epsilon else int(self.q(self.state).argmax())
            new, reward, done = self.env.step(action)
            self.buffer.append((self.state, action, np.float32(reward), done, new))
            self.state = self.env.reset() if done else new

        def train_dataloader(self) -> Any:
            return loader(Replay(self.buffer), 4, shuffle=False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.play(max(0.1, 1 - self.global_step / 20))
            s, a, r, done, new = batch
            values = self.q(s).gather(1, a.long().unsqueeze(-1)).squeeze(-1)
            with torch.no_grad():
                ahead = self.target(new).max(1)[0]
                ahead[done] = 0.0
            if self.global_step % 4 == 0:
                self.target.load_state_dict(self.q.state_dict())
            return F.smooth_l1_loss(values, ahead * 0.9 + r)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.q.parameters(), 1e-2)

    return made(DQN(), None)


@training
def actor_and_critic_over_stored_rollouts() -> Made:
    class PPO(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.actor, self.critic = (
                nn.Sequential(nn.Linear(8, 16), nn.Tanh()),
                nn.Linear(16, 4),
                nn.Linear(16, 1),
            )
            self.old: dict[str, Tensor] = {}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, a = batch
            h = self.body(x)
            dist = Categorical(logits=self.actor(h))
            logp = dist.log_prob(a)
            old = self.old.get("logp", logp.detach())
            ratio = (logp - old).exp()
            self.old = {"logp": logp.detach(), "value": self.critic(h).detach()}
            advantage = x.sum(1) - self.old["value"].squeeze(1)
            surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            return (
                -surrogate.mean() + 0.5 * F.mse_loss(self.critic(h).squeeze(1), x.sum(1)) - 0.01 * dist.entropy().mean()
            )

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 3e-3, eps=1e-5)

    return made(PPO(), loader(vectors()), gradient_clip_val=0.5)
