"""Rows measured one by one, and what is kept of them: plain values, to JSON and back."""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil
import re
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import lightning_accel.claims
from lightning_accel.claims.claim import Claim, Figure, Missing, NotHereError, Target, verdict_of
from lightning_accel.claims.machine import machine
from lightning_accel.claims.measure import Others

_DISTURBING_CORES = 0.25

Measure = Callable[[], Iterable[Figure | Missing]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One claim and what was found.

    Attributes:
        row: The claim's number.
        text: The claim.
        claimed: The numbers, as the articles give them.
        figures: What was measured.
        missing: What could not be measured here.
        verdict: In words.
        why: The reason; for a row that was not measured, what it takes.
        seconds: How long it took.
        others_cores: How many cores other processes took meanwhile: times measured beside them are not to be trusted.
        has_failed: Whether the benchmark broke off.
    """

    row: int
    text: str
    claimed: str
    figures: tuple[Figure, ...] = ()
    missing: tuple[Missing, ...] = ()
    verdict: str
    why: str
    seconds: float
    others_cores: float = 0.0
    has_failed: bool = False

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes took so much that its times may be others when they are gone."""
        return self.others_cores > _DISTURBING_CORES

    @property
    def outcome(self) -> str:
        """The verdict without its conditions."""
        return self.verdict if self.has_failed else verdict_of(self.figures)[0] or self.verdict

    @property
    def command(self) -> str:
        """What measures it again."""
        return f"lightning-accel claims --row {self.row}"


@dataclass(frozen=True, kw_only=True)
class Record:
    """A run over rows.

    Attributes:
        machine: Where: what :func:`~lightning_accel.claims.machine.machine` says.
        date: When: year-month-day.
        rows: In the order of their numbers.
    """

    machine: dict[str, Any]
    date: str
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)

    def with_rows_of(self, older: Record) -> Record:
        """These rows, and the others of an older record of the same machine and the same versions."""
        assert self.machine == older.machine
        rows = {row.row: row for row in (*older.rows, *self.rows)}
        return replace(self, rows=tuple(rows[number] for number in sorted(rows)))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Record:
        """What :meth:`to_dict` gave, read back from JSON."""
        rows = []
        for row in values["rows"]:
            missing = tuple(Missing(**one) for one in row["missing"])
            rows.append(Row(**{**row, "figures": tuple(map(_figure, row["figures"])), "missing": missing}))
        return cls(machine=values["machine"], date=values["date"], rows=tuple(rows))


def row_numbers() -> dict[int, str]:
    """The rows that there are: number → module."""
    names = (module.name for module in pkgutil.iter_modules(lightning_accel.claims.__path__))
    matches = (re.fullmatch(r"row_(\d\d)_\w+", name) for name in names)
    return {int(match[1]): match[0] for match in matches if match}


def measure_rows(numbers: Iterable[int], tell: Callable[[str], None] = lambda line: None) -> Record:
    """Measures the rows of these numbers, one after another; several, each in a process of its own.

    What one leaves behind (memory that is not given back, algorithms that were chosen, threads) changes the times of
    the next by more than what is to be measured.

    Args:
        numbers: From :func:`row_numbers`.
        tell: Given a line about each row when it is done.
    """
    chosen = sorted(set(numbers))
    measure = measure_row if len(chosen) == 1 else _measure_apart
    rows = []
    for number in chosen:
        row = measure(number)
        tell(f"row {row.row}, {row.seconds:.0f} s: {row.verdict}{f' ({row.why})' if row.has_failed else ''}")
        if row.is_disturbed:
            tell(
                f"    other processes took {row.others_cores:.1f} cores meanwhile: measure it again when they are done"
            )
        rows.append(row)
    return Record(machine=machine(), date=time.strftime("%Y-%m-%d"), rows=tuple(rows))


def measure_row(number: int) -> Row:
    """Measures the row of this number, in this process."""
    module = _module(number)
    return measured(module.CLAIM, module.measure)


def _measure_apart(number: int) -> Row:
    start = time.perf_counter()
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(measure_row, number).result()
    except BrokenProcessPool:
        return _row(_module(number).CLAIM, "failed", "its process came to a sudden end", start)


def _module(number: int) -> Any:
    return importlib.import_module(f"lightning_accel.claims.{row_numbers()[number]}")


def measured(claim: Claim, measure: Measure) -> Row:
    """Measures one claim; an error in its benchmark is written down, and does not keep the others from theirs."""
    figures: list[Figure] = []
    missing: list[Missing] = []
    torch.manual_seed(0)
    start, others = time.perf_counter(), Others()
    try:
        # Of what is deprecated on one side of a comparison, nobody who reads the table has to be told.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for found in measure():
                (figures if isinstance(found, Figure) else missing).append(found)  # type: ignore[arg-type]
        outcome, verdict = verdict_of(figures)
        why = "; ".join(gap.reason for gap in missing) if outcome is None else claim.why[outcome]
    except NotHereError as error:
        verdict, why = "not measured here", str(error)
    except Exception as error:
        verdict, why = "failed", f"{type(error).__name__}: {error}"
    return _row(claim, verdict, why, start, figures=tuple(figures), missing=tuple(missing), others_cores=others.cores())


def _row(claim: Claim, verdict: str, why: str, start: float, **found: Any) -> Row:
    return Row(
        row=claim.row,
        text=claim.text,
        claimed=claim.claimed,
        verdict=verdict,
        why=why,
        seconds=time.perf_counter() - start,
        has_failed=verdict == "failed",
        **found,
    )


def _figure(values: dict[str, Any]) -> Figure:
    target = values["target"]
    return Figure(**{**values, "target": None if target is None else Target(**target)})
