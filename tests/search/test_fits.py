"""No run is out of memory right after the search that has found its batch: what fits is measured in whole runs.

Lightning-AI/pytorch-lightning#20231 (a batch that a finder has found does not fit in the fit that follows, in the same
process) and huggingface/transformers#33281: here every setup trains in a process of its own, from its first step on,
with its optimizer's states, and its peak is that of all the batches that it has seen.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_accel.core.host import Host
from lightning_accel.search import tune
from lightning_accel.search.job import TrialSetup, TuneJob
from lightning_accel.search.search_cache import Answers
from lightning_accel.search.setup_runs import SetupRuns
from support.search_runs import Sleeper, samples, searched, trainer

pytestmark = pytest.mark.numbers

MIB = 1 << 20
AS_IT_IS = TrialSetup()
CPU = Host(kind="cpu", device_name="a CPU")


class Hungry(Sleeper):
    """Needs so many MiB for each sample of a batch, for every step, or for one of them."""

    def __init__(self, a_sample: int = 0, *, first: int = 0, later: int = 0, step_s: float = 0.01) -> None:
        super().__init__(step_s)
        self.a_sample, self.first, self.later = a_sample, first, later
        self.steps = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.steps += 1
        mib = self.a_sample * len(batch[0]) + self.first * (self.steps == 1) + self.later * (self.steps == 40)
        held = torch.ones(mib * MIB // 4)  # written to: what is only asked for is not there
        return super().training_step(batch, batch_idx) + 0 * held[:1].sum()


class Wide(Sleeper):
    """32 MiB of parameters."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.wide = nn.Linear(2048, 4096, bias=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.wide(torch.ones(2048)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def bench_of(model: Any, *, batch_size: int = 4) -> SetupRuns:
    job = TuneJob.of(model, DataLoader(samples(64), batch_size), trainer())
    answers = Answers({"search": "one"})
    return SetupRuns(job, CPU, "speed", limit=1 << 40, available=1 << 40, answers=answers, seconds=60)


def needed(model: Any) -> int:
    """MiB above what there was before the first step."""
    bench = bench_of(model)
    try:
        facts = bench.facts(AS_IT_IS)
        return (facts.needed_bytes - facts.base_bytes) // MIB
    finally:
        bench.close()


@pytest.mark.slow
def test_the_states_of_an_optimizer_are_part_of_what_a_run_needs() -> None:
    assert needed(Wide()) >= 90  # the gradient and two states, of 32 MiB each


@pytest.mark.slow
def test_what_only_the_first_step_needs_has_to_fit() -> None:
    assert needed(Hungry(first=160)) >= 150


@pytest.mark.slow
def test_a_batch_that_needs_more_later_is_no_winner() -> None:
    bench = bench_of(Hungry(later=160))
    try:
        bench.limit = bench.facts(AS_IT_IS).needed_bytes + 64 * MIB
        # A larger batch takes half as long for a sample; by the 40th step it has come to the one that does not fit.
        result = bench.compare("batch_size=8", AS_IT_IS, TrialSetup(batch_size=8), 60.0)
        assert result.verdict == "needs more memory"
        assert any("batches differ in what they need" in note for note in bench.notes)
    finally:
        bench.close()


@pytest.mark.slow
def test_the_run_after_the_search_fits() -> None:
    """A batch of 16 fits, one of 32 does not: the winner, trained anew for longer than on trial, keeps to the limit."""
    model = Hungry(4, step_s=0.1)  # whatever the batch: the largest that fits is the fastest
    plain = bench_of(model, batch_size=8)
    limit = plain.facts(AS_IT_IS).needed_bytes + 64 * MIB
    plain.close()
    data = DataLoader(samples(64), 8)
    outcome = searched(model, data, limit=limit, seconds=120.0)
    assert outcome.best.batch_size == 16
    plain = bench_of(model, batch_size=8)
    try:
        run = plain.run(outcome.best)
        run.block(40)
        assert run.most_bytes <= limit
    finally:
        plain.close()


def test_of_a_gpu_what_others_hold_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated card of 80 GiB, of which another process holds 30, and this one 10."""
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * gib, 80 * gib))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * gib)
    assert tune._available(torch.device("cuda", 0)) == int(0.9 * 50 * gib)
