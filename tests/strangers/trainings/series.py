"""Series of numbers: attention, convolutions and stacks over time."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from strangers.table import Made, drawn, drawn_ints, loader, made, training


class _Adam(LightningModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=5e-3, weight_decay=0.1)


@training
def truncated_backpropagation_by_hand_in_chunks() -> Made:
    class Chunks(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.cell, self.out = nn.GRUCell(3, 10), nn.Linear(10, 3)
            self.state: dict[str, Tensor] = {}

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            (series,) = batch
            opt, h, total = self.optimizers(), self.state.get("h", torch.zeros(len(series), 10)), 0.0
            for chunk in series.split(4, dim=1):
                loss = 0
                for t in range(chunk.size(1) - 1):
                    h = self.cell(chunk[:, t], h)
                    loss = loss + F.smooth_l1_loss(self.out(h), chunk[:, t + 1])
                opt.zero_grad()
                self.manual_backward(loss)
                opt.step()
                h, total = h.detach(), total + loss.detach()
            self.state["h"] = h
            return total

    return made(Chunks(), loader(TensorDataset(drawn(24, 12, 3)), drop_last=True))


@training
def attention_followed_by_dropout() -> Made:
    class Pooled(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.attn = nn.Linear(6, 16), nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
            self.drop, self.norm, self.head = nn.Dropout(0.3), nn.LayerNorm(16), nn.Linear(16, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch
            h = self.proj(x)
            attended, _ = self.attn(h, h, h, need_weights=False)
            return F.binary_cross_entropy_with_logits(
                self.head(self.norm(h + self.drop(attended)).mean(1)).squeeze(1), y
            )

    series = TensorDataset(drawn(24, 10, 6), drawn_ints(2, 24).float())
    return made(Pooled(), loader(series), val_check_interval=2)


@training
def attention_time_first_with_weights_kept() -> Made:
    class Inspected(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.head = nn.MultiheadAttention(6, 2, dropout=0.2), nn.Linear(6, 1)
            self.maps: list[Tensor] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0].transpose(0, 1)
            out, weights = self.attn(x, x, x)
            self.maps.append(weights.detach())
            return F.mse_loss(self.head(F.dropout(out, 0.2)).mean(0), batch[1])

    return made(Inspected(), loader(TensorDataset(drawn(24, 10, 6), drawn(24, 1, seed=2))))


@training
def temporal_convolutions() -> Made:
    class Chomp(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, :, :-2].contiguous()

    class TCN(_Adam):
        def __init__(self) -> None:
            super().__init__()
            conv = nn.utils.parametrizations.weight_norm
            self.net = nn.Sequential(
                conv(nn.Conv1d(3, 8, 3, padding=2)),
                Chomp(),
                nn.ReLU(),
                nn.Dropout(0.2),
                conv(nn.Conv1d(8, 8, 2, dilation=2, padding=2)),
                Chomp(),
                nn.ReLU(),
                nn.Dropout1d(0.2),
                nn.Conv1d(8, 3, 1),
            )

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0].permute(0, 2, 1)
            out = self.net(x[..., :-1])
            return F.huber_loss(out, x[..., -out.size(-1) :])

    return made(TCN(), loader(TensorDataset(drawn(24, 12, 3))))


@training
def nbeats() -> Made:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
            self.theta_b, self.theta_f = nn.Linear(16, 3, bias=False), nn.Linear(16, 3, bias=False)
            t = torch.linspace(0, 1, 12)
            self.basis = torch.stack([t**i for i in range(3)])  # neither a parameter nor a buffer

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.fc(x)
            return self.theta_b(h) @ self.basis[:, :8], self.theta_f(h) @ self.basis[:, 8:]

    class NBeats(_Adam):
        def __init__(self) -> None:
            super().__init__()
            self.stacks = nn.ModuleList(Stack() for _ in range(3))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, y = batch[0][:, :8], batch[0][:, 8:]
            forecast = torch.zeros_like(y)
            for stack in self.stacks:
                back, ahead = stack(x)
                x, forecast = x - back, forecast + ahead
            smape = (200 * (y - forecast).abs() / (y.abs() + forecast.abs() + 1e-3)).mean()
            self.log("smape", smape, on_step=True)
            return F.l1_loss(forecast, y)

    return made(NBeats(), loader(TensorDataset(drawn(24, 12))))
