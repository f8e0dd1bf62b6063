"""What a run says of itself: the summary, the report."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from logging.handlers import BufferingHandler
from typing import Any

import pytest

from lightning_accel import AccelPlugin
from support.lightning_models import Supervised, Transformer, cnn, images, tokens

MakeTrainer = Callable[..., Any]


@pytest.fixture
def said() -> Iterator[Callable[[], list[str]]]:
    kept = BufferingHandler(capacity=10_000)
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.addHandler(kept)
    logger.setLevel(logging.INFO)
    yield lambda: [record.getMessage() for record in kept.buffer if "lightning-accel" in record.getMessage()]
    logger.setLevel(level)
    logger.removeHandler(kept)


def test_fit_prints_one_summary(make_trainer: MakeTrainer, said: Callable[[], list[str]]) -> None:
    make_trainer(plugins=[AccelPlugin()]).fit(Supervised(cnn()), images(), images())
    assert len(said()) == 1
    assert "precision" in said()[0]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_runs_print_none(make_trainer: MakeTrainer, said: Callable[[], list[str]], stage: str) -> None:
    getattr(make_trainer(plugins=[AccelPlugin()]), stage)(Supervised(cnn()), images())
    assert said() == []


def test_the_report_stays_after_the_run(make_trainer: MakeTrainer) -> None:
    plugin = AccelPlugin(precision="32-true", gradient_checkpointing="full")
    make_trainer(plugins=[plugin]).fit(Supervised(Transformer()), tokens())
    assert plugin.report.applied("gradient_checkpointing") == [f"net.blocks.{i}" for i in range(3)]
    assert "net.blocks.0" in plugin.report.to_text()


def test_the_report_goes_to_json(make_trainer: MakeTrainer) -> None:
    plugin = AccelPlugin(precision="bf16-mixed")
    make_trainer(plugins=[plugin]).fit(Supervised(cnn()), images())
    assert json.loads(plugin.report.to_json())["techniques"]["precision"]["status"].startswith("bf16-mixed")
