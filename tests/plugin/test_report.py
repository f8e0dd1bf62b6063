"""What a run says of itself: the summary, the report."""

from __future__ import annotations

import copy
import json
import logging
import pickle
from collections.abc import Callable, Iterator
from logging.handlers import BufferingHandler
from typing import Any

import pytest

from lightning_accel import AccelPlugin
from support.lightning_models import Supervised, Transformer, cnn, images, mlp, tokens, vectors

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
    assert "inplace_activations" in said()[0]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_runs_print_none(make_trainer: MakeTrainer, said: Callable[[], list[str]], stage: str) -> None:
    getattr(make_trainer(plugins=[AccelPlugin()]), stage)(Supervised(cnn()), images())
    assert said() == []


def test_the_report_stays_after_the_run(make_trainer: MakeTrainer) -> None:
    plugin = AccelPlugin(precision="32-true", memory={"checkpoint": "full"})
    make_trainer(plugins=[plugin]).fit(Supervised(Transformer()), tokens())
    assert plugin.report.applied("gradient_checkpointing") == [f"net.blocks.{i}" for i in range(3)]
    assert "net.blocks.0" in plugin.report.to_text()


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_has_a_report_of_its_own(make_trainer: MakeTrainer, stage: str) -> None:
    plugin, module = AccelPlugin(precision="32-true", report=False), Supervised(cnn())
    trainer = make_trainer(plugins=[plugin])
    getattr(trainer, stage)(module, images())
    assert plugin.report is plugin.evaluation_report
    trainer.fit(module, images())
    of_fit = plugin.report
    getattr(trainer, stage)(module, images())
    assert plugin.report is of_fit
    assert plugin.evaluation_report is not of_fit
    assert plugin.evaluation_report.techniques


def test_what_copies_of_a_plugin_have_done_is_in_its_report(make_trainer: MakeTrainer) -> None:
    plugin = AccelPlugin(precision="32-true", memory={"checkpoint": "full"}, report=False)
    first, second = copy.deepcopy(plugin), copy.deepcopy({"plugins": [plugin]})["plugins"][0]
    make_trainer(plugins=[first]).fit(Supervised(Transformer()), tokens())
    of_first = plugin.report
    assert of_first.applied("gradient_checkpointing")
    make_trainer(plugins=[second]).fit(Supervised(Transformer()), tokens())
    assert plugin.report is first.report is second.report is not of_first
    assert first._kept is not second._kept


def test_another_process_has_the_report_and_goes_on_with_its_own(make_trainer: MakeTrainer) -> None:
    plugin = AccelPlugin(precision="32-true", report=False)
    make_trainer(plugins=[plugin]).fit(Supervised(cnn()), images())
    other = pickle.loads(pickle.dumps(plugin))
    assert other.report.to_dict() == plugin.report.to_dict()
    make_trainer(plugins=[other]).fit(Supervised(mlp()), vectors())
    assert other.report.to_dict() != plugin.report.to_dict()


def test_the_report_goes_to_json(make_trainer: MakeTrainer) -> None:
    plugin = AccelPlugin(precision="bf16-mixed")
    make_trainer(plugins=[plugin]).fit(Supervised(cnn()), images())
    assert json.loads(plugin.report.to_json())["techniques"]["precision"]["status"].startswith("bf16-mixed")
