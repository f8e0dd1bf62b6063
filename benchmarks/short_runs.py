"""Whether ``AccelPlugin()`` costs a short fit anything: 1 to 1,000 steps of small models, fresh and remembered.

    python benchmarks/short_runs.py [--models mlp,bert] [--steps 1,20] [--rounds 3] [--precision 32-true] [--threads 1]
                                    [--json docs/results]

`Trainer.fit` is timed from its call to its return, in wall time and in processor time, which includes processes that
the fit has started. In every round, and in random order, these train the same steps of a model from the same seed, each
in a process of its own, forked from one that has nothing but imports behind it:

- plain, twice;
- fresh: with the plugin and an empty cache folder; and again, in the same process;
- in a new process, with that folder.

Each process begins with two steps of a plain fit, and of another model with the plugin, so that no side pays for what
every first fit of a process pays, nor for the memory that a fork copies where it is first touched: 5 ms of a plugin's
code, where a process of its own pays 2 ms once. A ratio is the median over the rounds of one round's plain by its
accelerated fit. Rounds go over all models and lengths, so that a busy minute of the machine hits none in all of them.
On a machine where others compute, ask for one thread: two that wait for each other measure the others. The whole takes
about 20 minutes on two cores, half of that for 1,000 steps.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import random
import resource
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from _measure import publish
from _small_models import MODELS
from lightning.pytorch import Trainer, seed_everything

from lightning_accel import AccelPlugin
from lightning_accel.settings import Plan

NAMES = ("mlp", "lstm", "bert", "vit", "unet", "small_gpt", "small_cnn")
ROUNDS = {1: 7, 3: 7, 20: 5, 60: 4, 200: 3, 1000: 1}  # by the number of steps: what is soon over varies most
PLAIN, PLAIN_AGAIN, FRESH, AGAIN, ANEW = "plain", "plain again", "fresh", "again", "in a new process"
BESIDE = {FRESH: PLAIN, AGAIN: PLAIN_AGAIN, ANEW: PLAIN}
LEAST, LATEST_S = 0.98, 0.15  # of plain's speed; and how much later a single step may be over
COLUMNS = (
    *("", "steps", "plain, ms", "at most later, ms"),
    *(heading for run in BESIDE for heading in (f"{run}: speed", "least to most", "CPU")),
)

Cost = tuple[float, float]  # of a fit, in seconds: by the clock, and of processors
Round = dict[str, Cost]  # of each run


def fits(name: str, steps: int, settings: dict[str, Any] | None, times: int, threads: int, folder: Path) -> list[Cost]:
    """What so many fits of a model cost, one after the other in this process; without settings they are plain."""
    os.environ["LIGHTNING_ACCEL_CACHE"] = str(folder / "cache")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # what the console is told
    _fit(name, 2, None, folder)
    other = "mlp" if name != "mlp" else "lstm"
    for warming in ({"trust": "checked"}, {}):
        _fit(other, 2, warming, folder / "other")
    return [_fit(name, steps, settings, folder) for _ in range(times)]


def _fit(name: str, steps: int, settings: dict[str, Any] | None, folder: Path) -> Cost:
    seed_everything(0, verbose=False)
    module, data = MODELS[name].task()
    trainer = Trainer(
        plugins=[] if settings is None else [AccelPlugin.from_plan(Plan().replace(**settings))],
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        limit_val_batches=0,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    began, cpu_began = time.perf_counter(), _cpu_s()
    trainer.fit(module, data)
    return time.perf_counter() - began, _cpu_s() - cpu_began


def _cpu_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def one_round(name: str, steps: int, settings: dict[str, Any], threads: int) -> Round:
    """Every run of a model once, in random order."""
    found: Round = {}
    processes = {PLAIN: (PLAIN, PLAIN_AGAIN), FRESH: (FRESH, AGAIN), ANEW: (ANEW,)}
    order = random.sample(list(processes), 3)
    if order.index(ANEW) < order.index(FRESH):  # which it goes on from
        order = [{FRESH: ANEW, ANEW: FRESH}.get(first, first) for first in order]
    with tempfile.TemporaryDirectory() as folder:
        for first in order:
            runs = processes[first]
            asked = name, steps, None if first == PLAIN else settings, len(runs), threads, Path(folder)
            with multiprocessing.get_context("fork").Pool(1) as process:
                found |= zip(runs, process.apply(fits, asked), strict=True)
    return found


def row(title: str, steps: int, rounds: list[Round]) -> list[str]:
    plain_ms = 1e3 * statistics.median(each[PLAIN][0] for each in rounds)
    cells = [title, f"{steps:,}", f"{plain_ms:,.0f}", f"{1e3 * later_s(rounds):+,.0f}"]
    for run in BESIDE:
        speeds, cpu = ratios(rounds, run, 0), ratios(rounds, run, 1)
        spread = f"{min(speeds):.2f} to {max(speeds):.2f}"
        cells += [f"{statistics.median(speeds):.2f}x", spread, f"{statistics.median(cpu):.2f}x"]
    return cells


def ratios(rounds: list[Round], run: str, which: int) -> list[float]:
    """Plain by that run in each round: in wall time, or in processor time."""
    return [each[BESIDE[run]][which] / each[run][which] for each in rounds]


def worst(rounds: list[Round]) -> float:
    """The least of all ratios of a model at one length."""
    return min(statistics.median(ratios(rounds, run, which)) for run in BESIDE for which in (0, 1))


def later_s(rounds: list[Round]) -> float:
    """How much later than plain the latest of the runs is over, in seconds."""
    return max(statistics.median(each[run][0] - each[plain][0] for each in rounds) for run, plain in BESIDE.items())


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=NAMES, metavar=",".join(MODELS))
    parser.add_argument("--steps", type=numbers, default=list(ROUNDS))
    parser.add_argument("--rounds", type=int, help=f"by default by the number of steps: {ROUNDS}")
    parser.add_argument("--precision", help="the plugin's")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch's")
    options, _ = parser.parse_known_args()
    settings = {} if options.precision is None else {"precision": options.precision}
    if {"bert", "vit"} & set(options.models):  # here, as each of the processes would import them else
        from transformers import BertForSequenceClassification, ViTForImageClassification  # noqa: F401
    gc.collect()
    rounds = {steps: options.rounds or ROUNDS.get(steps, 3) for steps in options.steps}
    found: dict[tuple[str, int], list[Round]] = {(name, steps): [] for name in options.models for steps in rounds}
    for number in range(max(rounds.values())):
        left = [(name, steps) for name, steps in found if number < rounds[steps]]
        for name, steps in random.sample(left, len(left)):
            found[name, steps].append(one_round(name, steps, settings, options.threads))
            print(f"round {number + 1}: ", "  ".join(row(name, steps, found[name, steps])), flush=True)
    ordered = sorted(found, key=lambda cell: worst(found[cell]), reverse=True)
    slower = sum(worst(each) < LEAST for each in found.values())
    late = sum(later_s(each) > LATEST_S for (_, steps), each in found.items() if steps == 1)
    print(f"\nbelow {LEAST}x: {slower} of {len(found)}; a single step more than {LATEST_S} s later: {late}")
    chosen = {"models": ",".join(options.models), "steps": ",".join(map(str, options.steps)), "rounds": options.rounds}
    usual = {"models": ",".join(NAMES), "steps": ",".join(map(str, ROUNDS)), "rounds": None}
    chosen = {name: value for name, value in chosen.items() if value != usual[name]} | settings
    command = " ".join(["python benchmarks/short_runs.py", *(f"--{name} {value}" for name, value in chosen.items())])
    publish(
        "short_runs",
        f"{command} --threads {options.threads}",
        COLUMNS,
        [row(MODELS[name].title, steps, found[name, steps]) for name, steps in ordered],
        {f"{name}, {steps}": found[name, steps] for name, steps in ordered},
        by_machine=True,
    )


if __name__ == "__main__":
    main()
