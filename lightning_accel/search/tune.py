"""`tune`: finds, before a run, the settings that make it fastest or smallest on this machine."""

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
from lightning_accel.core.text_columns import aligned
from lightning_accel.lightning.packages import LightningDataModule, LightningModule, Trainer, own
from lightning_accel.lightning.plugin import AccelPlugin
from lightning_accel.search.job import LOADER_SETTINGS, TrialSetup, TuneJob
from lightning_accel.search.judging import OBJECTIVES, Objective
from lightning_accel.search.search import Search, SearchOutcome, SearchProgress, better
from lightning_accel.search.search_cache import answers_for
from lightning_accel.search.setup_runs import SetupRuns

_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|sec|min|m|h)\s*")
_UNITS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600}
_USABLE_CPU, _USABLE_GPU = 0.8, 0.9  # of the memory; the rest is for other programs, and for fragmentation


@dataclass(frozen=True)
class TuneResult:
    """The result of tuning.

    Attributes:
        settings: The settings to change, by section: ``trainer``, ``data`` (or ``model``) and ``accel``.
        environment: Variables to set before Python starts.
        has_changes: Whether there is anything to change, also by hand.
        has_compared: Whether at least one comparison was made.
        ratio: The samples a second, as a multiple of those before, with an interval: ``"1.84x [1.60, 2.05]"``. Empty if
            nothing changes or there was nothing to compare with.
        memory: The peak memory, as a multiple of that before; 1.0 if nothing changes.
        is_whole: Whether everything was tried. If not, a second call continues where this one stopped.
        table: A line for each comparison.
        notes: Further remarks.
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
        """Returns a one-line summary."""
        if not self.has_changes:
            tried = "nothing that was tried is better for sure" if self.has_compared else "nothing was compared"
            return f"as it is: {tried}"
        if not self.ratio:
            return "found, and not compared with the run as it is"
        return f"{self.ratio} the samples a second, {self.memory:.2f}x the memory"

    def to_yaml(self) -> str:
        """Returns a configuration for Lightning's command line, to be given after the run's own."""
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
    """Finds the best combination of settings that cannot change during a run, by short runs in other processes.

    Batch size, the loader's workers, compilation, threads, memory settings, the allocator: the largest possible gain is
    tried first; then each change is left out once more; then all are compared with the original run. These runs train
    copies on one device, without loggers, callbacks and checkpoints. The caller's objects are not changed. The learning
    rate stays the same even if the batch changes.

    Args:
        model: The module.
        data: Its data module or training loader. If None, the module has its own ``train_dataloader``.
        trainer: The Trainer of the later run: its ``AccelPlugin``, accumulation, clipping and length are read.
        time: The time for tuning: ``"90s"``, ``"3min"``, ``"1h"``, or seconds.
        objective: ``"speed"``: samples a second; ``"memory"``: one percent of memory is worth four of time;
            ``"balanced"``: one percent of memory is worth one of time.
        memory_limit: The most memory that a run may hold: its allocator's on a GPU, its process's on a CPU. If None,
            what the machine has.
        keep_effective_batch: Whether the number of samples in an optimizer step must stay the same.
        places: Where a configuration has its ``batch_size`` and the loader's settings: name → keys of each place. By
            default under ``data`` or ``model``, or both.

    Raises:
        ValueError: A value is not allowed; the run does not train; no setup fits into the limit; the time is too short
            for one comparison; the module or the data cannot be copied.
        TypeError: The data is not of a type that can be trained on.
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
    """Converts a time to seconds.

    Raises:
        ValueError: The value is not a time, or not above 0.
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
        # Other processes may hold some of it. The memory that this process holds will be available for the run, too.
        return int(_USABLE_GPU * (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)))
    return int(_USABLE_CPU * psutil.virtual_memory().available)


def _places(job: TuneJob) -> dict[str, list[tuple[str, ...]]]:
    """Returns the places of settings: under the sections of the objects that have them."""
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
        old, new = job.plan.to_dict(), job.plan.replace(**best.plan).to_dict()
        settings["accel"] = {name: value for name, value in new.items() if value != old[name]}
    effective = (best.batch_size or 0) * (best.accumulate or job.accumulate)
    if best.batch_size and job.batch_size and effective != job.batch_size * job.accumulate:
        times = effective / (job.batch_size * job.accumulate)
        notes.append(f"An optimizer step sees {times:g}x as many samples as before. The learning rate is as it was.")
    before, after = outcome.facts.get(TrialSetup().key), outcome.facts.get(best.key)
    rows = ((one.name, f"{better(one)}: {one.interval}, on {one.turns} steps") for one in outcome.results)
    return TuneResult(
        settings=settings,
        environment=dict(best.environment),
        has_changes=best != TrialSetup(),
        has_compared=bool(outcome.results),
        ratio="" if outcome.whole is None or best == TrialSetup() else str(outcome.whole.interval),
        memory=1.0 if before is None or after is None else after.peak_bytes / before.peak_bytes,
        is_whole=outcome.is_whole,
        table="\n".join(aligned(rows)),
        notes=tuple(notes),
    )


def _put(settings: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        settings = settings.setdefault(key, {})
    settings[path[-1]] = value
