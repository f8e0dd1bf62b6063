"""`padding` with ``group_by_length`` under a Trainer: its own loader, one rank or two, and what is left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_accel.core.report import AccelWarning
from lightning_accel.data import Map
from support.plugin.texts import NUM_TEXTS, Reader, fit, loader
from support.scripts import SUPPORT, run_script

pytestmark = [pytest.mark.numbers, pytest.mark.filterwarnings("ignore:The 'train_dataloader' does not have many")]


def mean_longest(seen: Any) -> float:
    """To how many tokens batches are padded, on the mean."""
    return sum(longest for _, longest in seen) / len(seen)


def test_each_epoch_has_every_text_once_and_shorter_batches() -> None:
    plain, grouped = Reader(), Reader()
    fit(plain, loader(), max_epochs=2, plan={"padding": 8})
    own = loader()
    plugin = fit(grouped, own, max_epochs=2)
    for epoch in (grouped.seen[:40], grouped.seen[40:]):
        assert sorted(number for numbers, _ in epoch for number in numbers) == list(range(NUM_TEXTS))
    assert mean_longest(grouped.seen) < 0.8 * mean_longest(plain.seen)
    assert plugin.report.of("padding").status.endswith(
        "samples of 1 to 80 tokens grouped by length, 50 batches at a time"
    )
    assert "grouped by length" in plugin.report.of("padding").changes["train_dataloader"]


def test_the_trainer_gets_the_users_own_loader_back() -> None:
    own, shown = loader(), []

    class Look(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            self.trainer = trainer
            shown.append(trainer.train_dataloader is own)

    look = Look()
    fit(Reader(), own, callbacks=[look])
    assert shown == [False]
    assert look.trainer.train_dataloader is own


@pytest.mark.parametrize(
    ("make", "options", "why"),
    [
        (lambda: loader(shuffle=False), {}, "the order of its SequentialSampler is not random"),
        (lambda: [loader(), loader()], {}, "it is one of several"),
        (loader, {"reload_dataloaders_every_n_epochs": 1}, "made anew every 1 epochs"),
    ],
)
def test_what_is_left_is_a_warning_and_in_the_report(make: Callable[[], Any], options: Any, why: str) -> None:
    class First(Reader):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[0] if isinstance(batch, list) else batch, batch_idx)

    with pytest.warns(AccelWarning, match=f"padding: batches are not grouped by length.*{why}"):
        plugin = fit(First(), make(), **options)
    assert why in plugin.report.refused("padding")["train_dataloader"]


def test_beside_it_workers_are_left_with_the_reason() -> None:
    plugin = fit(Reader(), loader(), max_epochs=2, plan={"loader": "auto"})
    assert "grouped by length" in plugin.report.of("padding").status
    assert "it is a GroupedLoader, which is not rebuilt" in plugin.report.of("loader").status


def _same(xp: Any, batch: Any) -> Any:
    return batch


def test_behind_a_pipeline_the_batches_are_the_same() -> None:
    alone, behind = Reader(), Reader()
    fit(alone, loader())
    plugin = fit(behind, loader(), plan={"preprocess": [Map(_same)]})
    assert "while one is in work" in plugin.report.of("preprocess").status
    assert behind.seen == alone.seen


@pytest.mark.slow
def test_two_ranks_have_each_text_once_and_their_longest_together(tmp_path: Path) -> None:
    run_script(SUPPORT / "plugin" / "grouped_ranks.py", tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert "grouped by length" in first["status"]
    assert "grouped by length" in second["status"]
    numbers = [number for rank in (first, second) for batch, _ in rank["seen"] for number in batch]
    assert sorted(numbers) == list(range(NUM_TEXTS))
    apart = [abs(one - other) for (_, one), (_, other) in zip(first["seen"], second["seen"], strict=True)]
    # Of 80 tokens. With an order of each rank's own it would be 26 on the mean, and hardly ever below 14.
    assert sum(apart) / len(apart) < 12
