"""All private names of Lightning that the library uses, one function each; core/torch_private states the rules.

If no version is named, every Lightning 2 has the name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from lightning_accel.lightning.packages import (
    ClusterEnvironment,
    CombinedLoader,
    DDPStrategy,
    LayerSync,
    LightningModule,
    ModelParallelStrategy,
    Precision,
    Strategy,
    Trainer,
)
from lightning_accel.step.layers import Call, Layer

# -- loops ---------------------------------------------------------------------------------------------------------


def combined_loader(loop: Any) -> CombinedLoader | None:
    """Returns the object over which one of the Trainer's loops iterates; its loaders can be exchanged there.

    The Trainer's public properties, such as ``train_dataloader``, only show the loaders. Without the name: None. Then
    loaders stay wrapped after a run, and the position of a batch is unknown.
    """
    return getattr(loop, "_combined_loader", None)


def is_sequential(combined: CombinedLoader) -> bool:
    """Returns whether a batch comes from one of the loaders, not from all. No public property shows this.

    Without the name: whether there is a single loader.
    """
    mode = getattr(combined, "_mode", None)
    return len(combined.flattened) < 2 if mode is None else mode == "sequential"


def logged_results(trainer: Trainer) -> dict[str, Any] | None:
    """Returns the metrics that ``self.log`` has collected in the current loop, by key; None outside of loops.

    ``trainer.callback_metrics`` has only reduced values. Without the name: None. Then the logged values of a failed
    step are counted again with its repetition.
    """
    return getattr(trainer, "_results", None)


# -- precision and strategies --------------------------------------------------------------------------------------


def after_closure(precision: Precision, model: LightningModule, optimizer: Optimizer) -> None:
    """Calls the hooks between the backward pass and the optimizer's step, and clips gradients.

    Lightning leaves both to a precision plugin that steps the optimizer itself. Without the name: an
    ``AttributeError``, as training without clipping would be silently wrong.
    """
    precision._after_closure(model, optimizer)


def layer_sync(strategy: Strategy) -> LayerSync | None:
    """Returns what ``Trainer(sync_batchnorm=True)`` put into the strategy, or None.

    Without the name: None. Then Lightning's own form is used, which computes on GPUs only.
    """
    return getattr(strategy, "_layer_sync", None)


def replace_layer_sync(strategy: Strategy, sync: LayerSync) -> None:
    """Replaces the object that :func:`layer_sync` returns."""
    vars(strategy)["_layer_sync"] = sync


def set_data_parallel_size(strategy: ModelParallelStrategy, size: int) -> None:
    """Sets the number of processes to shard over, which is known only after the constructor. Since Lightning 2.3.

    Without the name: nothing changes, and Lightning reports that the sizes of the device mesh do not fit.
    """
    vars(strategy)["_data_parallel_size"] = size


def ddp_settings(strategy: DDPStrategy) -> dict[str, Any]:
    """Returns the arguments for DistributedDataParallel, which depend on the first step, after the constructor.

    Without the name: an ``AttributeError``, as every wrapper would be the wrong one.
    """
    settings: dict[str, Any] = strategy._ddp_kwargs
    return settings


def cluster_environment(trainer: Trainer) -> ClusterEnvironment | None:
    """Returns the environment that started the processes, such as SLURM. One-device strategies do not publish it.

    Without the name: the strategy's own, or None.
    """
    connector = getattr(trainer, "_accelerator_connector", trainer.strategy)
    return getattr(connector, "cluster_environment", None)


# -- fetches -------------------------------------------------------------------------------------------------------

_BEFORE_FETCH, _AFTER_FETCH = "_on_before_fetch", "_on_after_fetch"


class FetchPatch(Layer):
    """Calls ``began`` and ``ended`` around every fetch from the train dataloader.

    It wraps the methods that the loop calls there. Without the names, neither is called, and the wait for a batch
    counts as part of the gaps between steps.

    Attributes:
        hears: Whether the names exist.
    """

    name = "timeline"

    def __init__(self, trainer: Trainer, began: Callable[[], Any], ended: Callable[[], Any]) -> None:
        self._loop = trainer.fit_loop
        epochs = self._loop.epoch_loop
        self.hears = hasattr(epochs, _BEFORE_FETCH)
        super().__init__([(epochs, [name for name in (_BEFORE_FETCH, _AFTER_FETCH) if hasattr(epochs, name)])])
        self._began, self._ended = began, ended

    def around_on_before_fetch(self, call: Call) -> None:
        self._began()
        call()

    def around_on_after_fetch(self, call: Call) -> None:
        call()
        self._ended()

    @override
    def _apply(self) -> None:
        super()._apply()
        self._rebind()

    @override
    def _undo(self) -> None:
        super()._undo()
        self._rebind()

    def _rebind(self) -> None:
        """Gives the current methods to the running epoch, which stored references to them when it began."""
        epochs, fetcher = self._loop.epoch_loop, getattr(self._loop, "_data_fetcher", None)
        for held, name in (("_start_profiler", _BEFORE_FETCH), ("_stop_profiler", _AFTER_FETCH)):
            if hasattr(epochs, name) and getattr(getattr(fetcher, held, None), "__self__", None) is epochs:
                setattr(fetcher, held, getattr(epochs, name))


# -- command line --------------------------------------------------------------------------------------------------


def parser_actions(parser: Any) -> list[Any]:
    """Returns the arguments of a jsonargparse parser, by argparse's own name; publicly they are only in the help text.

    Without the name: none, and the error for a misspelt key names no nearest one.
    """
    return list(getattr(parser, "_actions", ()))
