"""Notices ranks that run different blocks: under FSDP what they gather then meets what the others gather."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_accel.core.ranks import gather

_ALWAYS, _THEN_EVERY = 20, 100  # steps: each of the first, then now and then


class BlockOrder:
    """The order in which the blocks of a module are called in a step, compared between the ranks.

    FSDP gathers a block in a collective call. Where one rank calls another block of the same size instead (dropped
    layers, experts chosen by the data), neither of them fails: each computes with what the other's block holds.

    Args:
        module: Some of its parts are sharded by themselves.
    """

    def __init__(self, module: nn.Module) -> None:
        self._blocks = [name for name, part in module.named_modules() if name and isinstance(part, FSDPModule)]
        self._called: list[int] = []
        self._steps = 0
        self._handles = [
            module.get_submodule(name).register_forward_pre_hook(functools.partial(self._note, number))
            for number, name in enumerate(self._blocks)
        ]

    def _note(self, number: int, *_: Any) -> None:
        if torch.is_grad_enabled():  # an evaluation has no steps that would clear it away
            self._called.append(number)

    def begin_step(self) -> None:
        self._called.clear()

    def check(self) -> None:
        """To be called after the backward pass of every step. In some of them a collective call.

        Raises:
            RuntimeError: The ranks have called different blocks, or in another order. On every rank alike.
        """
        self._steps += 1
        if not self._blocks or (self._steps > _ALWAYS and self._steps % _THEN_EVERY):
            return
        orders = gather(self._called)
        for rank, order in enumerate(orders):
            if order != orders[0]:
                at = next((i for i, (a, b) in enumerate(zip(order, orders[0], strict=False)) if a != b), -1)
                theirs, first = (self._blocks[o[at]] if o else "no block" for o in (order, orders[0]))
                raise RuntimeError(
                    f"Rank {rank} ran {theirs!r} where rank 0 ran {first!r}. Blocks that accel_fsdp gathers one by one"
                    " have to run in the same order on every rank. For layers that are dropped, or chosen by the data,"
                    " name other blocks, strategy=AccelFSDPStrategy(blocks=['LayerClass']), or use"
                    " strategy='accel_ddp'."
                )

    def close(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
