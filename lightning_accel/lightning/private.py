"""Every name of Lightning's own that the library uses, one function each; see core/torch_private.py for the rules.

Where no version is named, every Lightning 2 has the name.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

# -- loops ---------------------------------------------------------------------------------------------------------


def is_accumulating(trainer: Trainer) -> bool:
    """Whether no optimizer steps after the training batch under way: its gradients are added to the next one's.

    Only the loop knows: it depends on the batch's number, on whether it is the last, and on the strategy.
    Without the name: the same for the first two, which all but DeepSpeed go by.
    """
    if (should_accumulate := getattr(trainer.fit_loop, "_should_accumulate", None)) is not None:
        return bool(should_accumulate())
    progress = trainer.fit_loop.epoch_loop.batch_progress
    is_last = progress.is_last_batch or progress.current.ready == trainer.num_training_batches
    return not is_last and progress.current.ready % trainer.accumulate_grad_batches != 0


def before_fetch(trainer: Trainer) -> str | None:
    """The method that ``trainer.fit_loop.epoch_loop`` calls before it asks its loader for a batch.

    It is there for the profiler; Lightning has no hook for users around a fetch.
    Without the name: None, and the time that a run waits for its data is not measured.
    """
    return _name_of_method(trainer.fit_loop.epoch_loop, "_on_before_fetch")


def after_fetch(trainer: Trainer) -> str | None:
    """The same for the method that is called when the loader has given a batch."""
    return _name_of_method(trainer.fit_loop.epoch_loop, "_on_after_fetch")


def _name_of_method(owner: Any, name: str) -> str | None:
    return name if callable(getattr(owner, name, None)) else None
