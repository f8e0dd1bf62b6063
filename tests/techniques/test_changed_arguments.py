"""Blocks that are given what every call changes: a second call, of a trial or a recomputation, is another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel import Plan, accelerate


class Cache:
    """What decoders hand from block to block: each call adds to it."""

    def __init__(self) -> None:
        self.seen = 0


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        cache.seen += 1
        return self.layer(x).relu()


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Caching() for _ in range(3))

    def forward(self, x: Tensor, cache: Cache) -> Tensor:
        for block in self.blocks:
            x = block(x, cache)
        return x


@pytest.mark.filterwarnings("ignore:.* was asked for and is not in force")
@pytest.mark.parametrize("setting", [{"compile": "on"}, {"gradient_checkpointing": "full"}])
def test_a_block_that_is_given_a_cache_is_left_alone(setting: dict[str, Any]) -> None:
    model = Decoder()
    (technique,) = setting
    handle = accelerate(model, Plan().replace(precision="32-true", flash_attention="off", **setting))
    for _ in range(3):
        cache = Cache()
        with handle.step():
            model(torch.ones(2, 4), cache).sum().backward()
        assert cache.seen == 3
    assert handle.report.refused(technique)["blocks.0"].startswith("takes a Cache, which")
    handle.undo()
