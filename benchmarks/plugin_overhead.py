"""What AccelPlugin and SpeedMemoryLogger cost a step that they do nothing for, and a rebound module's call.

    python benchmarks/plugin_overhead.py [--rounds 20] [--json docs/results]

Steps: one process, models so tiny that the loop's own time is all there is, in float32. Every way to train is a fit in
a thread of its own; they take turns of a few steps, past the trials. A turn's figure is the median of its steps, from
batch end to batch end, in the thread's own processor time, so that what else the machine does is left out; a cost is
the median of what turns took more than the plain ones beside them. Every round makes new fits, since where its objects
lie in memory makes a fit quicker or slower for good. All have the log interval and the logger that Lightning gives by
default, so that none is helped by logging less than another.

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
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _measure import publish
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_accel import AccelPlugin, Plan, accelerate
from lightning_accel.callbacks import SpeedMemoryLogger
from lightning_accel.claims.measure import timed_ms
from lightning_accel.techniques.flash_attention.dispatch import ORIGINAL, Dispatch, shape_class
from lightning_accel.techniques.flash_attention.multihead_site import MultiheadSite

BATCH_SIZE = 8
STEPS_A_TURN, TURNS, WARM_UP_TURNS = 20, 12, 2
PRECISION: dict[str, Any] = {"precision": "32-true"}  # what `auto` comes to where bfloat16 is not native
OFF: dict[str, Any] = {"flash_attention": "off", "inplace_activations": False, "memory_format": "preserve"}

Options = Callable[[], dict[str, Any]]  # of a Trainer
PLAIN: Options = dict


def linear() -> nn.Module:
    """No technique has a site in it."""
    return nn.Linear(8, 2)


def with_sites() -> nn.Module:
    """An activation that is computed in place, and running statistics to be looked after."""
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


CASES: dict[str, tuple[Callable[[], nn.Module], Options]] = {
    "ThroughputMonitor, Lightning's own": (
        linear,
        lambda: {"callbacks": [ThroughputMonitor(batch_size_fn=lambda batch: int(batch[0].size(0)))]},
    ),
    "SpeedMemoryLogger": (linear, lambda: {"callbacks": [SpeedMemoryLogger()]}),
    "AccelPlugin, all off": (linear, lambda: {"plugins": [AccelPlugin(**PRECISION, **OFF, log=False)]}),
    "AccelPlugin, defaults": (linear, lambda: {"plugins": [AccelPlugin(**PRECISION)]}),
    "AccelPlugin, defaults, a model with sites": (with_sites, lambda: {"plugins": [AccelPlugin(**PRECISION)]}),
}


class Tiny(LightningModule):
    """A step that is nearly all loop. It tells when a batch has ended, from inside the module."""

    flops_per_batch = 1  # without it ThroughputMonitor warns

    def __init__(self, net: nn.Module, ended: Callable[[], None]) -> None:
        super().__init__()
        self.net = net
        self._ended = ended

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).sum()

    def on_train_batch_end(self, *_: Any) -> None:
        self._ended()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Fit:
    """A fit in a thread of its own that rests after every few steps, so that several can take turns.

    Args:
        net: What to train.
        options: Of its Trainer.
        folder: For its logs.
    """

    def __init__(self, net: nn.Module, options: dict[str, Any], folder: str) -> None:
        self._turn, self._rest = threading.Semaphore(0), threading.Semaphore(0)
        self._ends_ns: list[int] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(net, options, folder), daemon=True)
        self._thread.start()

    def step_us(self) -> float:
        """Takes a turn; the median time in it from one step's end to the next."""
        self._ends_ns.clear()
        self._turn.release()
        self._rest.acquire()
        if self._failure is not None:
            raise self._failure
        return statistics.median(b - a for a, b in itertools.pairwise(self._ends_ns)) / 1e3

    def finish(self) -> None:
        self._turn.release()
        self._thread.join()

    def _run(self, net: nn.Module, options: dict[str, Any], folder: str) -> None:
        self._turn.acquire()
        data = DataLoader(TensorDataset(torch.randn(TURNS * STEPS_A_TURN * BATCH_SIZE, 8)), batch_size=BATCH_SIZE)
        quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        try:
            trainer = Trainer(accelerator="cpu", max_epochs=1, logger=TensorBoardLogger(folder), **quiet, **options)
            trainer.fit(Tiny(net, self._batch_ended), data)
        except BaseException as failure:
            self._failure = failure
        self._rest.release()

    def _batch_ended(self) -> None:
        self._ends_ns.append(time.thread_time_ns())
        if len(self._ends_ns) == STEPS_A_TURN:
            self._rest.release()
            self._turn.acquire()


def steps_us(rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """For every case: the time of a step of Lightning alone, and of the case, of every turn of every round."""
    baselines = {net: f"Lightning alone, {net.__name__}" for net, _ in CASES.values()}
    ways = {**CASES, **{name: (net, PLAIN) for net, name in baselines.items()}}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            fits = {name: Fit(net(), options(), folder) for name, (net, options) in ways.items()}
            for turn in range(TURNS):
                # In another order every time, so that none always runs in the same one's wake.
                for name in random.sample(list(ways), len(ways)):
                    took = fits[name].step_us()
                    if turn >= WARM_UP_TURNS:
                        times[name].append(took)
            for fit in fits.values():
                fit.finish()
    return {name: (times[baselines[net]], times[name]) for name, (net, _) in CASES.items()}


class ByHand(nn.Module):
    """Attention as people write it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.softmax(query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5, dim=-1) @ value


def rebound(module: nn.Module, inputs: tuple[Tensor, ...], **settings: Any) -> nn.Module:
    """``module`` with one technique at work on it."""
    model = nn.Sequential()
    model.add_module("site", module)
    handle = accelerate(model, Plan(**PRECISION | OFF | settings))
    for _ in range(4):  # past the trials
        with handle.step():
            module(*inputs)
    assert any(record.changes for record in handle.report.techniques.values()), handle.report
    return module


def left_to_itself(module: nn.MultiheadAttention, inputs: tuple[Tensor, ...]) -> nn.Module:
    """``module`` whose own attention was found the fastest: every call is looked at, since other shapes may differ."""
    dispatch = Dispatch(MultiheadSite("site", module), lambda *_: None, lambda *_: None)
    dispatch.install()
    dispatch.choose({shape_class(module, inputs, {}): ORIGINAL})
    return module


def calls_us() -> dict[str, tuple[list[float], list[float]]]:
    """Of every module that stays rebound: the time of a call as it was, and as it is now, of every round."""
    one, three = (torch.randn(8, 8),), (torch.randn(2, 4, 8),) * 3
    attention, fusing = nn.MultiheadAttention(8, 2, batch_first=True), {"flash_attention": "sdpa", "verify": False}
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
    details = {"rounds": options.rounds, "turns": TURNS - WARM_UP_TURNS, "steps_a_turn": STEPS_A_TURN}
    publish("plugin_overhead", "python benchmarks/plugin_overhead.py", columns, rows, details)


if __name__ == "__main__":
    main()
