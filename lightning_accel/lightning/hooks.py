"""Where a run's batches, predictions and checkpoints pass through its strategy, and the engine sees them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch.strategies import Strategy

from lightning_accel.core.patch import MethodPatch, Patch
from lightning_accel.engine import Engine


def strategy_hooks(
    strategy: Strategy, engine: Engine, restore_layouts: Callable[[dict[str, Any]], None]
) -> Iterator[Patch]:
    """The edits that have a strategy's batches and predictions go through ``engine``.

    ``restore_layouts(checkpoint)`` brings the tensors of a checkpoint into the layouts that the user's own have.
    """

    def with_own_layouts(state_dict: dict[str, Any]) -> dict[str, Any]:
        checkpoint = {"state_dict": state_dict}
        restore_layouts(checkpoint)
        return checkpoint["state_dict"]

    for name, change in (
        ("batch_to_device", engine.batch),
        ("predict_step", engine.predictions),
        # Not left to `on_save_checkpoint`, which is not called for a checkpoint of weights only.
        ("lightning_module_state_dict", with_own_layouts),
    ):
        yield MethodPatch(name, "in the run's layouts", strategy, name, functools.partial(followed_by, change))


def followed_by(change: Callable[[Any], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A strategy's method whose result passes through ``change``."""

    def method(strategy: Strategy, *args: Any, **kwargs: Any) -> Any:
        return change(original(strategy, *args, **kwargs))

    return method
