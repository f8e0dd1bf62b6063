"""What AccelPlugin and SpeedMemoryLogger cost a step that they do nothing for, and a rebound module's call.

    python benchmarks/plugin_overhead.py [--rounds 20] [--json docs/results]

Steps: models so tiny that the loop's own time is all there is, in float32, one fit at a time. In the middle of it, past
the trials, what was added is taken out of the loop for a turn of a few steps and put back for the next, in the order
ABBA: the same objects at the same places in memory. Two fits side by side differ by 150 µs for good, whoever is
quicker. A turn's figure is the median of its steps, from batch end to batch end, in the thread's own processor time, so
that what else the machine does is left out; a cost is the median of what turns with it took more than those beside
them. The row that adds nothing says what the instrument itself makes of it. All have the log interval and the logger
that Lightning gives by default, so that none is helped by logging less than another.

Calls: a module as it was, and as it is with its ``forward`` rebound, taking turns; forward passes alone.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import logging
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _measure import publish
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin, Plan, accelerate
from lightning_accel.callbacks import SpeedMemoryLogger
from lightning_accel.claims.measure import timed_ms
from lightning_accel.techniques.flash_attention.dispatch import ORIGINAL, Dispatch, Judge, shape_class
from lightning_accel.techniques.flash_attention.sites import MultiheadSite
from lightning_accel.techniques.registry import declarations
from lightning_accel.techniques.technique_context import TechniqueContext

BATCH_SIZE = 8
STEPS_A_TURN, TURNS, WARM_UP_TURNS = 5, 86, 6  # warm-up turns: 2 more than a multiple of 4
PRECISION: dict[str, Any] = {"precision": "32-true"}  # what `auto` comes to where bfloat16 is not native
OFF: dict[str, Any] = {name: "off" for name in declarations() if name not in PRECISION}

Options = Callable[[], dict[str, Any]]  # of a Trainer


def linear() -> nn.Module:
    """No technique has a site in it."""
    return nn.Linear(8, 2)


def with_sites() -> nn.Module:
    """An activation that is computed in place, and running statistics to be looked after."""
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


CASES: dict[str, tuple[Callable[[], nn.Module], Options]] = {
    "nothing": (linear, dict),
    "ThroughputMonitor, Lightning's own": (
        linear,
        lambda: {"callbacks": [ThroughputMonitor(batch_size_fn=lambda batch: int(batch[0].size(0)))]},
    ),
    "SpeedMemoryLogger": (linear, lambda: {"callbacks": [SpeedMemoryLogger()]}),
    "AccelPlugin, all off": (
        linear,
        lambda: {"plugins": [AccelPlugin.from_plan(Plan().replace(**PRECISION, **OFF, report=False))]},
    ),
    "AccelPlugin, defaults": (linear, lambda: {"plugins": [AccelPlugin.from_plan(Plan().replace(**PRECISION))]}),
    "AccelPlugin, defaults, a model with sites": (
        with_sites,
        lambda: {"plugins": [AccelPlugin.from_plan(Plan().replace(**PRECISION))]},
    ),
}


class Wiring:
    """What a fit calls at every step: with what was added to its Trainer, or as Lightning alone would have it.

    Args:
        trainer: In its fit.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._callbacks = list(trainer.callbacks)
        self._precision = trainer.strategy.precision_plugin
        loop = trainer.fit_loop
        loops = [loop, loop.epoch_loop, loop.epoch_loop.automatic_optimization]
        self._objects = [trainer.strategy, *loops, *trainer.lightning_module.modules()]
        self._rebound: list[tuple[Any, str, Any]] = []
        self._is_in = True

    def switch(self) -> None:
        """Takes what was added out, or puts it back."""
        self._is_in = not self._is_in
        self._trainer.callbacks[:] = self._callbacks if self._is_in else []
        self._trainer.strategy.precision_plugin = self._precision if self._is_in else Precision()
        if self._is_in:
            for thing, name, method in self._rebound:
                vars(thing)[name] = method
            return
        self._rebound = [
            (thing, name, value)
            for thing in self._objects
            for name, value in vars(thing).items()
            if hasattr(value, "__wrapped__")
        ]
        for thing, name, _ in self._rebound:
            del vars(thing)[name]


class Tiny(LightningModule):
    """A step that is nearly all loop; it takes the times of its turns."""

    flops_per_batch = 1  # without it ThroughputMonitor warns

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.with_it_us: list[float] = []
        self.plain_us: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).sum()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        turn, step = divmod(batch_idx, STEPS_A_TURN)
        if step == 0:
            if turn == WARM_UP_TURNS:
                self._wiring = Wiring(self.trainer)
            if turn >= WARM_UP_TURNS and turn % 2:  # with, without | without, with | with, ...
                self._wiring.switch()
            self._ends_ns: list[int] = []
        self._ends_ns.append(time.thread_time_ns())
        if step == STEPS_A_TURN - 1 and turn >= WARM_UP_TURNS:
            times = self.with_it_us if (turn + 1) // 2 % 2 else self.plain_us
            times.append(statistics.median(b - a for a, b in itertools.pairwise(self._ends_ns)) / 1e3)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def steps_us(rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """For every case: the time of a step without and with it, of every pair of turns of every round."""
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in CASES}
    data = DataLoader(TensorDataset(torch.randn(TURNS * STEPS_A_TURN * BATCH_SIZE, 8)), batch_size=BATCH_SIZE)
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    for name in [name for _ in range(rounds) for name in random.sample(list(CASES), len(CASES))]:
        net, options = CASES[name]
        tiny = Tiny(net())
        with tempfile.TemporaryDirectory() as folder:
            logger = TensorBoardLogger(folder)
            Trainer(accelerator="cpu", max_epochs=1, logger=logger, **quiet, **options()).fit(tiny, data)
        times[name][0].extend(tiny.plain_us)
        times[name][1].extend(tiny.with_it_us)
    return times


class ByHand(nn.Module):
    """Attention as people write it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.softmax(query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5, dim=-1) @ value


def rebound(module: nn.Module, inputs: tuple[Tensor, ...], **settings: Any) -> nn.Module:
    """``module`` with one technique at work on it."""
    model = nn.Sequential()
    model.add_module("site", module)
    handle = accelerate(model, Plan().replace(**PRECISION | OFF | settings))
    for _ in range(4):  # past the trials
        with handle.step():
            module(*inputs)
    assert any(record.changes for record in handle.report.techniques.values()), handle.report
    return module


def left_to_itself(module: nn.MultiheadAttention, inputs: tuple[Tensor, ...]) -> nn.Module:
    """``module`` whose own attention was found the fastest: every call is looked at, since other shapes may differ."""
    dispatch = Dispatch(MultiheadSite("site", module), Judge(TechniqueContext()))
    dispatch.apply()
    dispatch.open({shape_class(module, inputs, {}): ORIGINAL})
    return module


def calls_us() -> dict[str, tuple[list[float], list[float]]]:
    """Of every module that stays rebound: the time of a call as it was, and as it is now, of every round."""
    one, three = (torch.randn(8, 8),), (torch.randn(2, 4, 8),) * 3
    attention, fusing = nn.MultiheadAttention(8, 2, batch_first=True), {"flash_attention": "sdpa", "trust": "unchecked"}
    activation = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    sides: dict[str, tuple[nn.Module, nn.Module, tuple[Tensor, ...]]] = {
        "nn.MultiheadAttention, left to itself": (attention, left_to_itself(copy.deepcopy(attention), three), three),
        "nn.MultiheadAttention, fused": (attention, rebound(copy.deepcopy(attention), three, **fusing), three),
        "attention by hand, fused": (ByHand(), rebound(ByHand(), three, **fusing), three),
        "nn.Linear and nn.ReLU, in place": (
            activation,
            rebound(copy.deepcopy(activation), one, inplace_activations=True),
            one,
        ),
    }
    times = {}
    for name, (plain, ours, inputs) in sides.items():
        ms = timed_ms({"plain": functools.partial(plain, *inputs), "ours": functools.partial(ours, *inputs)})
        times[name] = [1e3 * took for took in ms["plain"]], [1e3 * took for took in ms["ours"]]
    return times


def row(name: str, plain: Sequence[float], ours: Sequence[float]) -> list[str]:
    """What ``ours`` took more than ``plain``, µs, each pair measured in one round."""
    extra = [b - a for a, b in zip(plain, ours, strict=True)]
    low, _, high = statistics.quantiles(extra, n=4)
    return [
        name,
        f"{statistics.median(plain):.1f}",
        f"{statistics.median(ours):.1f}",
        f"{statistics.median(extra):+.1f}",
        f"{low:+.1f} to {high:+.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    options, _ = parser.parse_known_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    steps, calls = steps_us(options.rounds), calls_us()
    rows = [row(f"a step: {name}", plain, ours) for name, (plain, ours) in steps.items()]
    rows += [row(f"a call: {name}", plain, ours) for name, (plain, ours) in calls.items()]
    columns = ["", "plain, µs", "with it, µs", "cost, µs", "quartiles of the turns"]
    details = {"rounds": options.rounds, "turns": (TURNS - WARM_UP_TURNS) // 2, "steps_a_turn": STEPS_A_TURN}
    publish("plugin_overhead", "python benchmarks/plugin_overhead.py", columns, rows, details)


if __name__ == "__main__":
    main()
