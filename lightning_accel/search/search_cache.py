"""The results of a search, stored so that a second search continues where the first stopped."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from lightning_accel.core.package_version import own_version
from lightning_accel.experiment.digest import digest
from lightning_accel.experiment.store import DamagedError, Key, Store
from lightning_accel.search.job import TrialSetup, TuneJob
from lightning_accel.search.judging import Facts, Objective
from lightning_accel.tuning.comparison import Result
from lightning_accel.tuning.verdict_cache import parameters_of


def _read(found: Mapping[str, Any]) -> tuple[float, dict[str, Facts], dict[str, Result]]:
    facts = {setup: Facts(**one) for setup, one in found["facts"].items()}
    return float(found["seconds"]), facts, {pair: Result.from_dict(one) for pair, one in found["results"].items()}


SEARCHES = Store("searches", _read)


class Answers:
    """Comparisons and measurements, by their setups; written after each comparison.

    Args:
        key: The key of the search; None if nothing is stored.
        seconds: The time of the search. An earlier search's open results are asked again if it had less time.
    """

    def __init__(self, key: Key | None = None, seconds: float = 0.0) -> None:
        self._key, self._seconds, self._asked_in_s = key, seconds, seconds
        self.complaint = ""  # why an earlier search's file was not used; empty if it was, or there was none
        self.facts: dict[str, Facts] = {}
        self._results: dict[str, Result] = {}
        try:
            if key is not None and (entry := SEARCHES.get(key)) is not None:
                self._asked_in_s, self.facts, self._results = entry.value
        except DamagedError as error:
            self.complaint = f"{error}: the search begins anew."

    def result(self, original: TrialSetup, candidate: TrialSetup) -> Result | None:
        """Returns the comparison of both. None if there is none, or an open one from a search with less time."""
        found = self._results.get(_pair(original, candidate))
        if found is not None and found.verdict == "cannot tell" and self._seconds > self._asked_in_s:
            return None
        return found

    def forget(self) -> None:
        """Removes all results, since they belong to another run."""
        self.facts.clear()
        self._results.clear()

    def add(self, original: TrialSetup, candidate: TrialSetup, result: Result) -> None:
        """Stores a comparison. From now on, the time of this search applies to all earlier open results, too."""
        self._results[_pair(original, candidate)] = result
        if self._key is not None:
            facts = {setup: asdict(one) for setup, one in self.facts.items()}
            results = {pair: asdict(one) for pair, one in self._results.items()}
            with suppress(OSError):  # results that cannot be stored are asked again
                SEARCHES.put(self._key, {"seconds": self._seconds, "facts": facts, "results": results})


def answers_for(job: TuneJob, host: str, objective: Objective, limit: int | None, seconds: float) -> Answers:
    """Returns the results of earlier searches for the same job, machine and objective."""
    about = (
        *(parameters_of(job.model), type(job.data).__qualname__, job.batch_size),
        *(sorted(job.loader_settings.items()), sorted(job.options.items()), job.accumulate, job.plan),
        *(job.max_steps, job.max_epochs, job.threads, job.matmul_precision, dict(job.model.hparams)),
        *(dict(getattr(job.data, "hparams", {})), _source_of(job.model), _source_of(job.data)),
        *(torch.__version__, own_version(), limit),
    )
    key = {"model": type(job.model).__qualname__, "host": host, "objective": objective, "job": digest(*about)}
    return Answers(key, seconds)


def _source_of(thing: object) -> str:
    """Returns the source of an object's class; empty if it cannot be read."""
    try:
        return inspect.getsource(type(thing))
    except (OSError, TypeError):
        return ""


def _pair(original: TrialSetup, candidate: TrialSetup) -> str:
    return f"{original.key} | {candidate.key}"
