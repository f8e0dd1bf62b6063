"""Where a run's batches, predictions and checkpoints pass through its strategy, and what its module logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning.pytorch.strategies import Strategy

from lightning_accel.core.patch import MethodPatch, Patch
from lightning_accel.engine import Engine


def strategy_hooks(
    strategy: Strategy, engine: Engine, restore_layouts: Callable[[dict[str, Any]], None]
) -> Iterator[Patch]:
    """The edits that have a strategy's batches and predictions go through ``engine``.

    Args:
        strategy: Of the run.
        engine: At work on its module.
        restore_layouts: Brings the tensors of a checkpoint into the layouts that the user's own have.
    """

    def with_techniques(original: Callable[..., Any]) -> Callable[..., Any]:
        def batch_to_device(strategy: Strategy, *args: Any, **kwargs: Any) -> Any:
            return engine.batch(original(strategy, *args, **kwargs))

        return batch_to_device

    def as_predicted(original: Callable[..., Any]) -> Callable[..., Any]:
        def predict_step(strategy: Strategy, *args: Any, **kwargs: Any) -> Any:
            return engine.predictions(original(strategy, *args, **kwargs))

        return predict_step

    def with_own_layouts(original: Callable[..., Any]) -> Callable[..., Any]:
        # Not left to `on_save_checkpoint`, which is not called for a checkpoint of weights only.
        def lightning_module_state_dict(strategy: Strategy) -> dict[str, Any]:
            checkpoint = {"state_dict": original(strategy)}
            restore_layouts(checkpoint)
            restored: dict[str, Any] = checkpoint["state_dict"]
            return restored

        return lightning_module_state_dict

    for name, wrap in (
        ("batch_to_device", with_techniques),
        ("predict_step", as_predicted),
        ("lightning_module_state_dict", with_own_layouts),
    ):
        yield MethodPatch(name, "in the run's layouts", strategy, name, wrap)
