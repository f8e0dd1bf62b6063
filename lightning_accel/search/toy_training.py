"""A small typical training for the comparison of allocators, in a process that runs turns on request.

It receives a number of turns, and answers with their measurements.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel.core.clocks import Stopwatch
from lightning_accel.core.heap import page_faults
from lightning_accel.core.peak_memory import PeakMemory
from lightning_accel.experiment.subprocess_runner import connect

_TOKENS, _WIDTH, _VOCABULARY = (2, 256), 128, 256
_MLP_STEPS = 4  # in a turn, with one step of the transformer


def _turn() -> list[Callable[[], None]]:
    """Returns the steps of a turn."""
    layers = [nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, batch_first=True, dropout=0.0) for _ in range(2)]
    transformer = nn.Sequential(nn.Embedding(_VOCABULARY, _WIDTH), *layers, nn.Linear(_WIDTH, _VOCABULARY))
    tokens = torch.randint(_VOCABULARY, _TOKENS)
    mlp = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    inputs, labels = torch.randn(64, 64), torch.randint(10, (64,))
    return [_step(transformer, tokens, tokens), *[_step(mlp, inputs, labels)] * _MLP_STEPS]


def _step(net: nn.Module, inputs: Tensor, labels: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)

    def step() -> None:
        F.cross_entropy(net(inputs).flatten(0, -2), labels.flatten()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Runs as many turns as each message says, until the process is ended."""
    torch.manual_seed(0)
    steps = _turn()
    peak = PeakMemory(torch.device("cpu"))
    connection = connect()
    while True:
        turns = connection.recv()
        faults, stopwatch = page_faults(), Stopwatch()
        for _ in range(turns):
            for step in steps:
                step()
        seconds = stopwatch.seconds() / turns
        faults = (page_faults() - faults) // turns
        connection.send({"seconds": seconds, "faults": faults, "peak_bytes": peak.peak_bytes()})
