"""One model of :mod:`downstream`, in that script's environment: trains it in turns, and prints what fits took.

    python benchmarks/_downstream_side.py MODEL ROUNDS SETTINGS[,...]

Each side of a round is a fork of this process, which has imported everything and computed nothing: as a new program
would be, without the seconds of its imports. The forks of a round take turns, of as many training steps as come to
:data:`TURN_S`: what slows the machine down for a while slows all of them down. The clock of a fork, the plugin's own
among it, stands still while another has the turn.
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _downstream_models import FITS, MODELS, OWN_PRECISION, PLAIN, SETTINGS
from _held_clocks import hold_clocks, standing

TURN_S = 0.05
"""Long beside what it takes to fill the processor's caches again, short beside what slows a machine down."""

MODULES = {
    "darts": "darts.models.forecasting.nlinear",
    "torch_geometric": "torch_geometric.nn",
    "scvi-tools": "scvi",
    "pytorch-forecasting": "pytorch_forecasting",
}


Fits = list[dict[str, float]]  # what each has measured


def await_turn(pipe: Connection) -> None:
    """Hands the turn over, and returns when it has come back."""
    with standing():
        pipe.send(None)
        pipe.recv()


def lightnings() -> list[types.ModuleType]:
    """Lightning, by the names under which the library has imported it."""
    return [sys.modules[name] for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules]


class Watch:
    """Stands in ``Trainer.fit``: hands the turn over before a step, and counts the steps.

    Args:
        accelerated: Whether fits are to be with the plugin.
        pipe: To whoever gives turns.

    Raises:
        RuntimeError: A fit was without the plugin where it was to be with it, or with it where it was to be plain.
    """

    def __init__(self, accelerated: bool, pipe: Connection) -> None:
        self.steps, self._accelerated, self._pipe, self._began_ns = 0, accelerated, pipe, time.perf_counter_ns()
        for lightning in lightnings():
            self._stand_in(lightning)

    def _stand_in(self, lightning: Any) -> None:
        from lightning_accel import AccelPlugin

        fit = lightning.Trainer.fit
        turn = lightning.Callback()
        turn.on_train_batch_start = self._hand_over

        @functools.wraps(fit)
        def watched(trainer: Any, *args: Any, **kwargs: Any) -> None:
            trainer.callbacks.append(turn)
            fit(trainer, *args, **kwargs)
            self.steps += trainer.global_step
            if isinstance(trainer.precision_plugin, AccelPlugin) != self._accelerated:
                raise RuntimeError(f"the Trainer's precision is {trainer.precision_plugin}")

        lightning.Trainer.fit = watched

    def _hand_over(self, *_: Any) -> None:
        if time.perf_counter_ns() - self._began_ns >= 1e9 * TURN_S:
            await_turn(self._pipe)
            self._began_ns = time.perf_counter_ns()


def added(library: str, side: str) -> dict[str, Any]:
    """To the Trainer's arguments."""
    from lightning_accel import AccelPlugin, Plan

    if side == PLAIN:
        return {}
    return (
        {"strategy": "accel"}
        if library in OWN_PRECISION
        else {"plugins": [AccelPlugin.from_plan(Plan().replace(**SETTINGS[side]))]}
    )


def fits(title: str, side: str, number: int, folder: Path, pipe: Connection) -> None:
    """The fork's side: so many fits, one after the other, each of a new model."""
    os.environ["LIGHTNING_ACCEL_CACHE"] = str(folder / "cache")
    os.chdir(tempfile.mkdtemp(dir=folder))  # loggers write there, and count what they find
    watch, found = Watch(side != PLAIN, pipe), []
    await_turn(pipe)
    for _ in range(number):
        lightnings()[0].seed_everything(0, verbose=False)
        fit = MODELS[title](added(title.split()[0], side))
        watch.steps, cpu, wall_ns = 0, time.process_time(), time.perf_counter_ns()
        fit()
        wall_s, cpu = (time.perf_counter_ns() - wall_ns) / 1e9, time.process_time() - cpu
        if not watch.steps:
            raise RuntimeError("the fit had another Trainer than those that are watched")
        found.append({"steps": watch.steps, "wall_s": wall_s, "cpu_s": cpu})
    pipe.send(found)


def side_by_side(title: str, folders: Mapping[str, Path], number: int, coin: random.Random) -> dict[str, Fits]:
    """What each side's fits took, by side; by turns.

    Raises:
        EOFError: They failed; what they printed says why.
    """
    context, pipes, processes = multiprocessing.get_context("fork"), {}, []
    for side, folder in folders.items():
        pipes[side], theirs = multiprocessing.Pipe()
        process = context.Process(target=fits, args=(title, side, number, folder, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes[side].recv()
        processes.append(process)
    found: dict[str, Fits] = {}
    try:
        while waiting := [side for side in folders if side not in found]:
            coin.shuffle(waiting)
            for side in waiting:
                pipes[side].send(None)
                if (answer := pipes[side].recv()) is not None:
                    found[side] = answer
    except BaseException:
        for process in processes:
            process.kill()  # within a fit, Lightning would only note that it is to end
        raise
    for process in processes:
        process.join()
    return found


def one_round(title: str, sides: Sequence[str], coin: random.Random) -> dict[str, dict[str, dict[str, float]]]:
    """Of each side its fits by name. Plain's folder has nothing to be found by a new process."""
    with tempfile.TemporaryDirectory() as folder:
        folders = {side: Path(folder) / side for side in sides}
        for own in folders.values():
            own.mkdir()
        two = side_by_side(title, folders, 2, coin)
        third = side_by_side(title, folders, 1, coin)
    return {side: dict(zip(FITS, [*two[side], *third[side]], strict=True)) for side in sides}


def main() -> None:
    title, rounds, settings = sys.argv[1:]
    hold_clocks()
    library = title.split()[0]
    importlib.import_module(MODULES.get(library, library))
    if not lightnings():
        importlib.import_module("lightning.pytorch")
    importlib.import_module("lightning_accel")
    coin = random.Random(title)
    print(json.dumps([one_round(title, [PLAIN, *settings.split(",")], coin) for _ in range(int(rounds))]), flush=True)


if __name__ == "__main__":
    main()
