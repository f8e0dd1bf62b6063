"""Detects ranks that run different blocks, whose gathers under FSDP would be mixed up."""

from __future__ import annotations

import functools
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_accel.core.ranks import gather

_ALWAYS, _THEN_EVERY = 20, 100  # steps: each of the first 20, then every 100th


class BlockOrder:
    """Compares between the ranks the order in which a step calls the sharded blocks of a module.

    FSDP gathers a block in a collective call. If one rank calls another block of the same size instead (dropped layers,
    experts chosen by the data), neither call fails: each rank computes with the weights of the other's block.
    """

    def __init__(self, module: nn.Module) -> None:
        self._called: list[str] = []
        self._steps = 0
        self._handles = [
            module.get_submodule(name).register_forward_pre_hook(functools.partial(self._note, name))
            for name, part in module.named_modules()
            if name and isinstance(part, FSDPModule)
        ]

    def _note(self, block: str, *_: Any) -> None:
        if torch.is_grad_enabled():  # an evaluation has no steps that would clear the list
            self._called.append(block)

    def begin_step(self) -> None:
        self._called.clear()

    def check(self) -> None:
        """Compares the order after the backward pass of every step. A collective call in some steps.

        Raises:
            RuntimeError: The ranks have called different blocks, or in another order. Raised on every rank.
        """
        self._steps += 1
        if not self._handles or (self._steps > _ALWAYS and self._steps % _THEN_EVERY):
            return
        orders = gather(self._called)
        for rank, order in enumerate(orders):
            for block, first in zip_longest(order, orders[0], fillvalue="no further block"):
                if block != first:
                    raise RuntimeError(
                        f"Rank {rank} ran {block!r} where rank 0 ran {first!r}. Blocks that accel_fsdp gathers one by"
                        " one have to run in the same order on every rank. For layers that are dropped, or chosen by"
                        " the data, name other blocks, strategy=AccelFSDPStrategy(blocks=['LayerClass']), or use"
                        " strategy='accel_ddp'."
                    )

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
