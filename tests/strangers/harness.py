"""Runs a stranger's training in one way or another, on a machine that is the same everywhere."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import random
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_accel import AccelPlugin
from lightning_accel.core import clocks
from lightning_accel.core.host import Host
from lightning_accel.experiment.trial import NumbersComparison, Trial
from lightning_accel.experiment.trial_runs import TrialSide
from lightning_accel.settings import Plan
from strangers.recorder import Recorder, outliving, signature, streams
from strangers.table import Training

SEED = 7
TURNS = 120
"""Of a run in which live trials take place: enough for the whole plan to be asked about, and some of its arms."""

_KEPT = 8  # runs of a kind: those of a few trainings

PLAIN, ROUNDED, MIXED = "plain", "rounded", "bf16-mixed"
NUDGED = tuple(f"nudged, coin {coin}" for coin in range(5))
IN_TURNS = tuple(f"bf16 in turns, coin {coin}" for coin in range(4))
TRUE, DEFAULTS = "32-true", "defaults"
UNTUNED, DETERMINISTIC = "tune off", "deterministic"

_PLUGINS: dict[str, dict[str, Any]] = {
    TRUE: {"precision": TRUE},
    DEFAULTS: {},
    UNTUNED: {"precision": TRUE, "trust": "checked"},
    DETERMINISTIC: {"precision": TRUE},
}


class Clock:
    """What live trials take for the time: nothing is faster for sure, so they go on to switch."""

    def __init__(self) -> None:
        self._rng, self._now_ns = random.Random(0), 0

    def perf_counter_ns(self) -> int:
        self._now_ns += round(1e6 * self._rng.lognormvariate(0, 0.3))
        return self._now_ns

    def perf_counter(self) -> float:
        return self.perf_counter_ns() / 1e9


class Move(Callback):
    """Moves every weight: how far two runs that are as good as each other may be apart.

    Args:
        coin: The seed by which the last bit goes up or down; from 1 on before every step, and the last bits, as steps
            that sum in another order have others; None: to the nearest bfloat16.
    """

    def __init__(self, coin: int | None) -> None:
        self._coin = None if coin is None else torch.Generator().manual_seed(coin)
        self._in_every_step, self._bits = bool(coin), 4 if coin else 1

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._move(pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._in_every_step:
            self._move(pl_module)

    def _move(self, pl_module: LightningModule) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                if parameter.is_floating_point() and not is_lazy(parameter):
                    parameter.copy_(parameter.bfloat16() if self._coin is None else self._nudged(parameter))

    def _nudged(self, parameter: Tensor) -> Tensor:
        up, down = (torch.nextafter(parameter, torch.full_like(parameter, end)) for end in (torch.inf, -torch.inf))
        moved = torch.where(torch.rand(parameter.shape, generator=self._coin) < 0.5, up, down)
        return parameter + self._bits * (moved - parameter)


class InTurns(MixedPrecision):
    """Lightning's own bfloat16 in the steps that a coin names, as live trials have it: how far that alone leads."""

    def __init__(self, coin: int) -> None:
        super().__init__(MIXED, "cpu")
        self._coin = random.Random(coin)

    def forward_context(self) -> Any:
        return super().forward_context() if self._coin.random() < 0.5 else contextlib.nullcontext()


@dataclasses.dataclass
class Run:
    """What is left of a run.

    Attributes:
        seen: What its own code could feel of each step.
        state: The module's ``state_dict``.
        optimizers: The signature of each tensor in the optimizers' states.
        kept: The signature of each tensor that the module leads to afterwards, parameters first.
        modules: Each module's type, whether it is in training, and what stands in its way to its own ``forward``.
        metrics: The names in ``callback_metrics``, ``logged_metrics`` and ``progress_bar_metrics``.
        callbacks: The types of the Trainer's callbacks.
        streams: The random streams afterwards.
        questions: How many comparisons live trials have ended.
        report: The plugin's, as it reads; empty without it.
    """

    seen: Recorder
    state: dict[str, Any]
    optimizers: list[Any]
    kept: dict[str, Any]
    modules: dict[str, Any]
    metrics: list[list[str]]
    callbacks: list[str]
    streams: dict[str, str]
    questions: int
    report: str


Legs = Sequence[tuple[str, int]]
"""Variants, each with the epochs it goes on for, from the checkpoint of the one before."""


def run(training: Training, legs: Legs, *, parts_are_faster: bool = True, cache: str | None = None) -> Run:
    """Runs a training, one leg after the other; what is seen is of the last.

    Args:
        training: What is run.
        legs: How, and for how long.
        parts_are_faster: What the trials of single parts find by the clock, if they ask it.
        cache: What an earlier run has left there is remembered; None: nothing is.
    """
    folder, checkpoint, epochs = Path(tempfile.mkdtemp(dir=".")).resolve(), None, 0
    with _simulated_machine(parts_are_faster, cache or str(folder / "cache")):
        for index, (variant, more) in enumerate(legs):
            epochs += more
            seed_everything(SEED + index, verbose=False)
            result, trainer = _leg(training, variant, epochs, checkpoint)
            if index < len(legs) - 1:
                checkpoint = folder / f"{index}.ckpt"
                trainer.save_checkpoint(checkpoint)
    return result


def _leg(training: Training, variant: str, epochs: int, checkpoint: Path | None) -> tuple[Run, Trainer]:
    parts = training.make()
    seen = Recorder(parts.elsewhere)
    options = {"max_epochs": epochs, **parts.options}
    given = options.pop("callbacks", [])
    coin = NUDGED.index(variant) if variant in NUDGED else None
    moved = [Move(coin)] if variant in (*NUDGED, ROUNDED) else []
    callbacks = [*given, *moved, seen]
    plugin = AccelPlugin.from_plan(Plan().replace(**_PLUGINS[variant])) if variant in _PLUGINS else None
    if plugin is not None:
        options["plugins"] = [plugin]
    if variant == MIXED:
        options["precision"] = MIXED
    if variant in IN_TURNS:
        options["plugins"] = [InTurns(IN_TURNS.index(variant))]
    if variant == DETERMINISTIC:
        options["deterministic"] = True
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    options = {"accelerator": "cpu", "devices": 1, "logger": DummyLogger(), **quiet, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(callbacks=callbacks, **options)
        trainer.fit(parts.module, parts.train, parts.val, ckpt_path=checkpoint, weights_only=False)
    return _left(parts.module, trainer, seen, plugin), trainer


def _left(module: LightningModule, trainer: Trainer, seen: Recorder, plugin: AccelPlugin | None) -> Run:
    metrics = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
    named = [*module.named_parameters(), *outliving(module, seen.elsewhere)]
    return Run(
        seen=seen,
        state=copy.deepcopy(module.state_dict()),
        optimizers=[_optimizer(optimizer) for optimizer in trainer.optimizers],
        kept={name: signature(tensor) for name, tensor in named},
        modules={name: _module(one) for name, one in module.named_modules()},
        metrics=[sorted(each) for each in metrics],
        callbacks=[type(callback).__name__ for callback in trainer.callbacks if not isinstance(callback, Move)],
        streams=streams(),
        questions=0 if plugin is None or plugin.tuning is None else len(plugin.tuning.results),
        report="" if plugin is None else str(plugin.report),
    )


def _optimizer(optimizer: Any) -> Any:
    state = getattr(optimizer, "state", {})
    each = [
        {k: signature(v) if isinstance(v, Tensor) else type(v).__name__ for k, v in one.items()}
        for one in state.values()
    ]
    groups = [{k: type(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return type(optimizer).__qualname__, each, groups


def _module(module: nn.Module) -> Any:
    attributes = vars(module)
    own = sorted(name for name, value in attributes.items() if callable(value) and not isinstance(value, type))
    hooks = {name: len(value) for name, value in attributes.items() if name.endswith("_hooks") and value}
    return f"{type(module).__module__}.{type(module).__qualname__}", module.training, own, sorted(attributes), hooks


@contextlib.contextmanager
def _simulated_machine(parts_are_faster: bool, cache: str) -> Iterator[None]:
    """One with native bfloat16 and no compiler, whose clock is ours; torch's flags are as before afterwards."""
    times = {"original_ms": 2.0, "candidate_ms": 1.0} if parts_are_faster else {"original_ms": 1.0, "candidate_ms": 2.0}

    def timed(trial: Trial, original: TrialSide, candidate: TrialSide) -> NumbersComparison:
        found = time(trial, original, candidate)
        return found if found.failure else dataclasses.replace(found, **times)

    time, cudnn = Trial.time, torch.backends.cudnn
    flags = torch.are_deterministic_algorithms_enabled(), cudnn.benchmark, cudnn.deterministic
    host = Host(kind="cpu", device_name="a CPU with bfloat16", native_bf16=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_ACCEL_CACHE", cache)
        patch.setattr(Host, "detect", lambda device=None: host)
        patch.setattr(Trial, "time", timed)
        patch.setattr(clocks, "time", Clock())
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(flags[0])
            cudnn.benchmark, cudnn.deterministic = flags[1:]


def long(training: Training) -> int:
    """So many epochs that live trials have their turns."""
    turns = plain(training, ((PLAIN, training.epochs),)).seen.turns
    return -(-TURNS * training.epochs // turns)


@functools.lru_cache(maxsize=_KEPT)
def plain(training: Training, legs: Legs) -> Run:
    """The run without us, once for all that are compared with it."""
    return run(training, legs)


@functools.lru_cache(maxsize=_KEPT)
def moved(training: Training, legs: Legs, variant: str) -> Run:
    """Plain, with weights that are moved at first."""
    (_, epochs), *rest = legs
    return run(training, ((variant, epochs), *rest))


@functools.lru_cache(maxsize=_KEPT)
def mixed(training: Training, legs: Legs, variant: str = MIXED) -> Run | None:
    """Under Lightning's own bfloat16, in all steps or in turns; None where that fails."""
    try:
        return run(training, [(variant, epochs) for _, epochs in legs]) if training.bf16 else None
    except Exception:
        return None
