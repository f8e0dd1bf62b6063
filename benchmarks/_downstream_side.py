"""One model of :mod:`downstream`, in that script's environment: trains it in turns, and prints what fits took.

    python benchmarks/_downstream_side.py MODEL ROUNDS SETTINGS[,...]

Each side of a round is a fork of this process, which has imported everything and computed nothing: as a new program
would be, without the seconds of its imports.
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
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _downstream_models import MODELS, OWN_PRECISION, PLAIN, SETTINGS

MODULES = {
    "darts": "darts.models.forecasting.nlinear",
    "torch_geometric": "torch_geometric.nn",
    "scvi-tools": "scvi",
    "pytorch-forecasting": "pytorch_forecasting",
}


def lightnings() -> list[types.ModuleType]:
    """Lightning, by the names under which the library has imported it."""
    return [sys.modules[name] for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules]


class Watch:
    """Stands in ``Trainer.fit``: how many steps were trained, and whether it was with the plugin.

    Raises:
        RuntimeError: A fit was without the plugin where it was to be with it, or with it where it was to be plain.
    """

    def __init__(self, accelerated: bool) -> None:
        self.steps, self._accelerated = 0, accelerated
        for lightning in lightnings():
            self._stand_in(lightning.Trainer)

    def _stand_in(self, kind: Any) -> None:
        from lightning_accel import AccelPlugin

        fit = kind.fit

        @functools.wraps(fit)
        def watched(trainer: Any, *args: Any, **kwargs: Any) -> None:
            fit(trainer, *args, **kwargs)
            self.steps += trainer.global_step
            if isinstance(trainer.precision_plugin, AccelPlugin) != self._accelerated:
                raise RuntimeError(f"the Trainer's precision is {trainer.precision_plugin}")

        kind.fit = watched


def added(library: str, side: str) -> dict[str, Any]:
    """To the Trainer's arguments."""
    from lightning_accel import AccelPlugin

    if side == PLAIN:
        return {}
    return {"strategy": "accel"} if library in OWN_PRECISION else {"plugins": [AccelPlugin(**SETTINGS[side])]}


def fits(title: str, side: str, number: int, folder: Path, pipe: Connection) -> None:
    """The fork's side: so many fits, one after the other, each of a new model."""
    os.environ["LIGHTNING_ACCEL_CACHE"] = str(folder / "cache")
    os.chdir(tempfile.mkdtemp(dir=folder))  # loggers write there, and count what they find
    watch, found = Watch(side != PLAIN), []
    for _ in range(number):
        lightnings()[0].seed_everything(0, verbose=False)
        fit = MODELS[title](added(title.split()[0], side))
        watch.steps, cpu, wall = 0, time.process_time(), time.perf_counter()
        fit()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if not watch.steps:
            raise RuntimeError("the fit had another Trainer than those that are watched")
        found.append({"steps": watch.steps, "wall_s": wall, "cpu_s": cpu})
    pipe.send(found)


def in_a_fork(title: str, side: str, number: int, folder: Path) -> list[dict[str, float]]:
    """What each of the fits took.

    Raises:
        EOFError: They failed; what they printed says why.
    """
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=fits, args=(title, side, number, folder, theirs))
    process.start()
    theirs.close()
    try:
        found: list[dict[str, float]] = ours.recv()
        return found
    finally:
        process.join()


def one_round(title: str, sides: Sequence[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Of each side its fits by name; ``sides`` in the order in which they are taken."""
    measured = {}
    for side in sides:
        with tempfile.TemporaryDirectory() as folder:
            fresh, second = in_a_fork(title, side, 2, Path(folder))
            measured[side] = {"fresh": fresh, "second": second}
            if side != PLAIN:
                (measured[side]["new process"],) = in_a_fork(title, side, 1, Path(folder))
    return measured


def main() -> None:
    title, rounds, settings = sys.argv[1:]
    library = title.split()[0]
    importlib.import_module(MODULES.get(library, library))
    if not lightnings():
        importlib.import_module("lightning.pytorch")
    importlib.import_module("lightning_accel")
    sides, found, coin = [PLAIN, *settings.split(",")], [], random.Random(title)
    for _ in range(int(rounds)):
        coin.shuffle(sides)
        found.append(one_round(title, sides))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
