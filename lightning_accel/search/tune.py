"""`tune`: finds, before a run, what makes it fastest or smallest on this machine."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import psutil
import torch
import yaml
from torch.utils.data import DataLoader

from lightning_accel.core.allocators import ENVIRONMENT_IN_FILE
from lightning_accel.core.byte_size import parse_bytes
from lightning_accel.core.checks import check_choice
from lightning_accel.core.host import Host
from lightning_accel.lightning.packages import LightningDataModule, LightningModule, Trainer, own
from lightning_accel.lightning.plugin import AccelPlugin
from lightning_accel.search.job import LOADER_SETTINGS, TuneJob
from lightning_accel.search.judging import OBJECTIVES, Facts, Objective
from lightning_accel.search.progress import SearchProgress, better
from lightning_accel.search.search import Search, SearchOutcome
from lightning_accel.search.search_cache import answers_for
from lightning_accel.search.setup import TrialSetup
from lightning_accel.search.setup_runs import SetupRuns

_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|sec|min|m|h)\s*")
_UNITS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}
_USABLE_CPU, _USABLE_GPU = 0.8, 0.9  # of the memory that there is; what is left is for others, and for gaps


@dataclass(frozen=True)
class TuneResult:
    """What tuning has come to.

    Attributes:
        settings: What to change, by section: ``trainer``, ``data`` (or ``model``) and ``accel``.
        environment: Variables to set before Python starts.
        has_changes: Whether anything is to be changed, be it by hand.
        has_compared: Whether anything was compared: it was not interrupted before.
        ratio: How many samples a second there are to one before, with an interval: ``"1.84x [1.60, 2.05]"``; empty
            where nothing changes, or nothing was there to compare with.
        memory: The peak, over that before; 1.0 where nothing changes.
        is_whole: Whether everything was tried; else a second call goes on where this one stopped.
        table: A line for each comparison.
        notes: What else there is to say.
    """

    settings: Mapping[str, Any]
    environment: Mapping[str, str]
    has_changes: bool
    has_compared: bool
    ratio: str
    memory: float
    is_whole: bool
    table: str
    notes: tuple[str, ...]

    def line(self) -> str:
        """In a line."""
        if not self.has_changes:
            tried = "nothing that was tried is better for sure" if self.has_compared else "nothing was compared"
            return f"as it is: {tried}"
        if not self.ratio:
            return "found, and not compared with the run as it is"
        return f"{self.ratio} the samples a second, {self.memory:.2f}x the memory"

    def to_yaml(self) -> str:
        """A configuration of Lightning's command line, to be given after the run's own."""
        comments = [f"Written by lightning-accel tune on {date.today()}: {self.line()}."]
        if self.environment:
            comments += [f"Not settings: start with {name}={value}" for name, value in self.environment.items()]
            comments.append("Or with `lightning-accel run`, which reads the next line.")
            comments.append(f"{ENVIRONMENT_IN_FILE}{json.dumps(dict(self.environment))}")
        comments += [line for note in self.notes for line in note.splitlines()]
        settings = dict(self.settings) or {"accel": {}}
        return "".join(f"# {line}\n" for line in comments) + yaml.safe_dump(settings, sort_keys=False)

    def __str__(self) -> str:
        return "\n".join([self.table, *self.notes, self.line()]).strip()


def tune(
    model: LightningModule,
    data: LightningDataModule | DataLoader[Any] | None = None,
    trainer: Trainer | None = None,
    *,
    time: str | float = "3min",
    objective: Objective = "speed",
    memory_limit: str | int | None = None,
    keep_effective_batch: bool = False,
    places: Mapping[str, Sequence[tuple[str, ...]]] | None = None,
) -> TuneResult:
    """Tries what cannot change in mid-run, in short runs of copies in other processes, and finds what is best together.

    Batch size, the loader's workers, compilation, threads, memory settings, the allocator: greedy, from what could gain
    most, then each left out once more, then all of them against the run as it is. These runs train on one device, and
    have no loggers, callbacks and checkpoints. Nothing of the caller's is touched, and the learning rate stays as it is
    even where the batch changes.

    Args:
        model: The module.
        data: Its data module or training loader; None: the module has a ``train_dataloader`` of its own.
        trainer: What it will be trained with: its ``AccelPlugin``, accumulation, clipping and length are read.
        time: How long it may take: ``"90s"``, ``"3min"``, ``"1h"``, or seconds.
        objective: ``"speed"``: samples a second; ``"memory"``: one percent of memory is worth four of time;
            ``"balanced"``: worth one.
        memory_limit: The most memory that a run may hold: on a GPU that of its allocator, on a CPU that of its process.
            None: what the machine has.
        keep_effective_batch: Whether as many samples as now have to make an optimizer step.
        places: Where a configuration has its ``batch_size`` and the loader's settings: name → keys, of each place. By
            default under ``data`` or ``model``, or both.

    Raises:
        ValueError: A value is not allowed; the run does not train; no setup fits into the limit; the time is too short
            for one comparison; the module or the data cannot be copied.
        TypeError: The data is none that can be trained on.
    """
    check_choice("objective", objective, OBJECTIVES)
    seconds = parse_time(time)
    limit = None if memory_limit is None else int(parse_bytes("memory_limit", memory_limit))
    if trainer is None:
        trainer = own(model, Trainer)(plugins=[AccelPlugin()], logger=False, enable_checkpointing=False)
    job = TuneJob.of(model, data, trainer)
    device = trainer.strategy.root_device
    host = Host.detect(device)
    with SearchProgress(seconds) as progress:
        answers, available = answers_for(job, host.described, objective, limit, seconds), _available(device)
        bench = SetupRuns(job, host, objective, limit=limit, available=available, answers=answers, seconds=seconds)
        search = Search(bench, seconds=seconds, keeps_effective_batch=keep_effective_batch, watcher=progress)
        outcome = search.run()
    return _result(outcome, job, _places(job) if places is None else places)


def parse_time(value: str | float) -> float:
    """Seconds.

    Raises:
        ValueError: It is no time, or not above 0.
    """
    if isinstance(value, str):
        match = _TIME.fullmatch(value)
        seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    else:
        seconds = float(value) if not isinstance(value, bool) else 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(
            f"time={value!r} is not possible. Allowed: '90s', '3min', '1h', or a number of seconds above 0."
        )
    return seconds


def _available(device: torch.device) -> int:
    if device.type == "cuda":
        # Others may hold some of it; what this process holds, it will hold then, too.
        return int(_USABLE_GPU * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)))
    return int(_USABLE_CPU * psutil.virtual_memory().available)


def _places(job: TuneJob) -> dict[str, list[tuple[str, ...]]]:
    """Under the sections of whoever has them."""
    names = ("batch_size", *LOADER_SETTINGS)
    if isinstance(job.data, DataLoader):
        return {name: [("data", name)] for name in names}
    places: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for section, owner in (("model", job.model), ("data", job.data)):
        known = () if owner is None else {*vars(owner), *owner.hparams}
        for name in names:
            if name in known:
                places[name].append((section, name))
    return places


def _result(outcome: SearchOutcome, job: TuneJob, places: Mapping[str, Sequence[tuple[str, ...]]]) -> TuneResult:
    best, notes = outcome.best, list(outcome.notes)
    settings: dict[str, Any] = {}
    if best.accumulate is not None and best.accumulate != job.accumulate:
        settings["trainer"] = {"accumulate_grad_batches": best.accumulate}
    for name, value in {**({"batch_size": best.batch_size} if best.batch_size else {}), **best.loader}.items():
        for place in places.get(name, ()):
            _put(settings, place, value)
        if not places.get(name):
            notes.append(f"{name}={value} has to be written by hand: no configuration has a place for it.")
    if best.plan:
        before, after = job.plan.to_dict(), job.plan.replace(**best.plan).to_dict()
        settings["accel"] = {name: value for name, value in after.items() if value != before[name]}
    effective = (best.batch_size or 0) * (best.accumulate or job.accumulate)
    if best.batch_size and job.batch_size and effective != job.batch_size * job.accumulate:
        times = effective / (job.batch_size * job.accumulate)
        notes.append(f"An optimizer step sees {times:g}x as many samples as before. The learning rate is as it was.")
    return TuneResult(
        settings=settings,
        environment=dict(best.environment),
        has_changes=best != TrialSetup(),
        has_compared=bool(outcome.results),
        ratio="" if outcome.whole is None or best == TrialSetup() else str(outcome.whole.interval),
        memory=_memory_ratio(outcome.facts, best),
        is_whole=outcome.is_whole,
        table=_table(outcome),
        notes=tuple(notes),
    )


def _put(settings: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        settings = settings.setdefault(key, {})
    settings[path[-1]] = value


def _memory_ratio(facts: Mapping[str, Facts], best: TrialSetup) -> float:
    before, after = facts.get(TrialSetup().key), facts.get(best.key)
    return 1.0 if before is None or after is None else after.peak_bytes / before.peak_bytes


def _table(outcome: SearchOutcome) -> str:
    width = max((len(result.name) for result in outcome.results), default=0)
    return "\n".join(
        f"{result.name:{width}}  {better(result)}: {result.interval}, on {result.turns} steps"
        for result in outcome.results
    )
