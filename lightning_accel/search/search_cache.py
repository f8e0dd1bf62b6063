"""What a search has found out, kept in the user's cache folder so that a second one goes on where the first stopped."""

from __future__ import annotations

import inspect
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from lightning_accel.core.atomic_write import write_whole
from lightning_accel.core.cache import digest
from lightning_accel.core.package_version import own_version
from lightning_accel.search.job import TuneJob
from lightning_accel.search.judging import Facts, Objective
from lightning_accel.search.setup import TrialSetup
from lightning_accel.tuning import tuning_cache
from lightning_accel.tuning.comparison import Result


class Answers:
    """Comparisons and facts, by the setups that they are about; written after every one.

    Args:
        path: The file; None: nothing is kept.
        seconds: How long the search may take; what an earlier one could not tell is asked again if that had less.
    """

    def __init__(self, path: Path | None = None, seconds: float = 0.0) -> None:
        self._path, self._seconds, self._asked_in_s = path, seconds, seconds
        self.complaint = ""  # why an earlier search's file was not used; empty where it was, or there was none
        self.facts: dict[str, Facts] = {}
        self._results: dict[str, Result] = {}
        if path is not None and path.is_file():
            try:
                self._read(json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                self.facts, self._results = {}, {}
                self.complaint = f"{path} is damaged ({type(error).__name__}: {error}): the search begins anew."

    def result(self, original: TrialSetup, candidate: TrialSetup) -> Result | None:
        """How the two compared; None where nobody has asked, or had too little time to tell."""
        found = self._results.get(_pair(original, candidate))
        if found is not None and found.verdict == "cannot tell" and self._seconds > self._asked_in_s:
            return None
        return found

    def forget(self) -> None:
        """Forgets everything: it was of another run."""
        self.facts.clear()
        self._results.clear()

    def add(self, original: TrialSetup, candidate: TrialSetup, result: Result) -> None:
        """Keeps how they compared."""
        self._results[_pair(original, candidate)] = result
        self._write()

    def _read(self, content: Any) -> None:
        self._asked_in_s = float(content["seconds"])
        self.facts = {key: Facts(**one) for key, one in content["facts"].items()}
        self._results = {key: Result.from_dict(one) for key, one in content["results"].items()}

    def _write(self) -> None:
        if self._path is None:
            return
        facts = {key: asdict(one) for key, one in self.facts.items()}
        results = {key: asdict(one) for key, one in self._results.items()}
        # Those that could not be told before are, by now, of this search.
        content = {"seconds": self._seconds, "facts": facts, "results": results}
        with suppress(OSError):  # what cannot be kept has to be asked again
            write_whole(self._path, json.dumps(content, indent=1))


def answers_for(job: TuneJob, host: str, objective: Objective, limit: int | None, seconds: float) -> Answers:
    """What earlier searches of the same job on the same machine, with the same aim, have found out."""
    parameters = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in job.model.named_parameters()]
    about = (
        *(type(job.model).__qualname__, parameters, type(job.data).__qualname__, job.batch_size),
        *(sorted(job.loader_settings.items()), sorted(job.options.items()), job.accumulate, job.plan),
        *(job.max_steps, job.max_epochs, job.threads, job.matmul_precision, dict(job.model.hparams)),
        *(dict(getattr(job.data, "hparams", {})), _source_of(job.model), _source_of(job.data)),
        *(host, torch.__version__, own_version(), objective, limit),
    )
    return Answers(tuning_cache.searches() / f"{digest(about)}.json", seconds)


def _source_of(thing: object) -> str:
    """The code that it is an object of, where that can be read."""
    try:
        return inspect.getsource(type(thing))
    except (OSError, TypeError):
        return ""


def _pair(original: TrialSetup, candidate: TrialSetup) -> str:
    return f"{original.key} | {candidate.key}"
