"""Every name of Lightning's own that the library uses, one function each; see core/torch_private for the rules.

Where no version is named, every Lightning 2 has the name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, cast

from torch.optim import Optimizer
from typing_extensions import override

from lightning_accel.core.patch import MethodPatch, Patch, PatchSet
from lightning_accel.lightning.packages import (
    Callback,
    ClusterEnvironment,
    CombinedLoader,
    DDPStrategy,
    LayerSync,
    LightningModule,
    ModelParallelStrategy,
    PassThroughProfiler,
    Precision,
    Strategy,
    Trainer,
    own,
)
from lightning_accel.step.layers import Call, Layer

# -- loops ---------------------------------------------------------------------------------------------------------


def combined_loader(loop: Any) -> CombinedLoader | None:
    """What one of the Trainer's loops iterates over, and through which its loaders can be exchanged.

    The Trainer's public properties, ``train_dataloader`` and others, only show the loaders.
    Without the name: None. Loaders then stay wrapped after a run, and the position of a batch is not known.
    """
    return getattr(loop, "_combined_loader", None)


def is_sequential(combined: CombinedLoader) -> bool:
    """Whether a batch comes from one of its loaders, and is not one of each: there is no public property for that.

    Without the name: whether there is a single loader.
    """
    mode = getattr(combined, "_mode", None)
    return len(combined.flattened) < 2 if mode is None else mode == "sequential"


def logged_results(trainer: Trainer) -> dict[str, Any] | None:
    """What ``self.log`` has put together in the loop under way: key → metric; None outside of loops.

    ``trainer.callback_metrics`` has only values that were reduced already.
    Without the name: None, and what a failed step has logged is counted with its repetition.
    """
    return getattr(trainer, "_results", None)


# -- precision and strategies --------------------------------------------------------------------------------------


def after_closure(precision: Precision, model: LightningModule, optimizer: Optimizer) -> None:
    """Calls the hooks between the backward pass and the optimizer's step, and clips gradients.

    Lightning leaves both to a precision plugin that steps the optimizer itself.
    Without the name: an ``AttributeError``, as training without clipping would be silently wrong.
    """
    precision._after_closure(model, optimizer)


def layer_sync(strategy: Strategy) -> LayerSync | None:
    """What ``Trainer(sync_batchnorm=True)`` put into the strategy; None without it.

    Without the name: None, and Lightning's own form is used, which computes on GPUs only.
    """
    return getattr(strategy, "_layer_sync", None)


def replace_layer_sync(strategy: Strategy, sync: LayerSync) -> None:
    """Puts another one in the place of what :func:`layer_sync` found."""
    vars(strategy)["_layer_sync"] = sync


def set_data_parallel_size(strategy: ModelParallelStrategy, size: int) -> None:
    """Says over how many processes to shard; the number is known later than the constructor. Since Lightning 2.3.

    Without the name: nothing changes, and Lightning says that the sizes of the device mesh do not fit.
    """
    vars(strategy)["_data_parallel_size"] = size


def ddp_settings(strategy: DDPStrategy) -> dict[str, Any]:
    """The arguments for DistributedDataParallel; they depend on the first step, which comes after the constructor.

    Without the name: an ``AttributeError``, as every wrapper would be the wrong one.
    """
    settings: dict[str, Any] = strategy._ddp_kwargs
    return settings


def cluster_environment(trainer: Trainer) -> ClusterEnvironment | None:
    """Where the processes of the run were started, SLURM say. Strategies for one device do not have it publicly.

    Without the name: what the strategy has, or None.
    """
    connector = getattr(trainer, "_accelerator_connector", trainer.strategy)
    return getattr(connector, "cluster_environment", None)


# -- actions -------------------------------------------------------------------------------------------------------


def hook_action(owner: LightningModule | Callback, hook: str) -> str:
    """The name by which Lightning tells its profiler of a hook."""
    if isinstance(owner, Callback):
        return f"[Callback]{owner.state_key}.{hook}"
    return f"[LightningModule]{type(owner).__name__}.{hook}"


class ActionPatch(Patch):
    """Has ``began`` and ``ended`` called around every one of these actions of Lightning's.

    Lightning has no hook there, and tells its profiler, by the names of actions.
    Without the names: nothing is told. Saving a checkpoint then counts as part of the step, and hooks see weights in
    channels_last. All who ask are told by one edit: a profiler is called some sixty times in a step.
    """

    def __init__(
        self, trainer: Trainer, actions: Collection[str], began: Callable[[], Any], ended: Callable[[], Any]
    ) -> None:
        super().__init__(f"told of {min(actions, default='nothing')}", "told of actions")
        self._profiler = cast(Any, trainer).profiler  # which Lightning sets where mypy does not look
        self._told = frozenset(actions), began, ended

    @override
    def _apply(self) -> None:
        told = _TOLD_OF_ACTIONS.get(self._profiler)
        if told is None:
            wanted: set[str] = set()
            told = _TOLD_OF_ACTIONS[self._profiler] = PatchSet(self._telling(wanted)), [], wanted
            told[0].apply()
        told[1].append(self._told)
        told[2].update(self._told[0])

    @override
    def _undo(self) -> None:
        patches, told, _ = _TOLD_OF_ACTIONS.get(self._profiler, _NOBODY)
        if self._told in told:
            told.remove(self._told)
        if not told:
            patches.undo()
            _TOLD_OF_ACTIONS.pop(self._profiler, None)

    def _telling(self, wanted: set[str]) -> Iterator[Patch]:
        all_told, passes = _TOLD_OF_ACTIONS, own(self._profiler, PassThroughProfiler)

        def told_before(original: Callable[..., Any]) -> Callable[..., Any]:
            profiles = original is not passes.start  # which does nothing: that much need not be called

            def start(profiler: Any, action_name: str) -> None:
                if action_name in wanted:
                    for actions, began, _ in list(all_told.get(profiler, _NOBODY)[1]):  # of a copy of it, nobody
                        if action_name in actions:
                            began()
                if profiles:
                    original(profiler, action_name)

            return start

        def told_after(original: Callable[..., Any]) -> Callable[..., Any]:
            profiles = original is not passes.stop

            def stop(profiler: Any, action_name: str) -> None:
                if profiles:
                    original(profiler, action_name)
                if action_name in wanted:
                    for actions, _, ended in list(all_told.get(profiler, _NOBODY)[1]):
                        if action_name in actions:
                            ended()

            return stop

        for name, wrap in {"start": told_before, "stop": told_after}.items():
            yield MethodPatch(name, "told of actions", self._profiler, name, wrap)


_BEFORE_FETCH, _AFTER_FETCH = "_on_before_fetch", "_on_after_fetch"


class FetchPatch(Layer):
    """Calls ``began`` and ``ended`` around every fetch from the train dataloader.

    It stands around the methods that the loop calls there. A profiler's actions are sixty a step: too many for one of
    milliseconds. Without the names nothing is told, and the wait for a batch counts as part of the gaps between steps.

    Attributes:
        hears: Whether the names are there.
    """

    name = "timeline"

    def __init__(self, trainer: Trainer, began: Callable[[], Any], ended: Callable[[], Any]) -> None:
        self._loop = trainer.fit_loop
        epochs = self._loop.epoch_loop
        self.hears = hasattr(epochs, _BEFORE_FETCH)
        super().__init__([(epochs, [name for name in (_BEFORE_FETCH, _AFTER_FETCH) if hasattr(epochs, name)])])
        self._began, self._ended = began, ended

    @override
    def around(self, stage: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        if stage == _BEFORE_FETCH:
            self._began()
        call(*args, **kwargs)
        if stage == _AFTER_FETCH:
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
        """Gives the methods as they are now to the epoch under way, which holds them as they were when it began."""
        epochs, fetcher = self._loop.epoch_loop, getattr(self._loop, "_data_fetcher", None)
        for held, name in (("_start_profiler", _BEFORE_FETCH), ("_stop_profiler", _AFTER_FETCH)):
            if hasattr(epochs, name) and getattr(getattr(fetcher, held, None), "__self__", None) is epochs:
                setattr(fetcher, held, getattr(epochs, name))


_Told = tuple[PatchSet, list[Any], set[str]]  # the edit, who is told, and of which actions
_NOBODY: _Told = PatchSet(), [], set()
_TOLD_OF_ACTIONS: weakref.WeakKeyDictionary[Any, _Told] = weakref.WeakKeyDictionary()


# -- command line --------------------------------------------------------------------------------------------------


def parser_actions(parser: Any) -> list[Any]:
    """The arguments of a parser of jsonargparse's, by argparse's own name; publicly they are in the help's text only.

    Without the name: none, and the error for a misspelt key names no nearest one.
    """
    return list(getattr(parser, "_actions", ()))
