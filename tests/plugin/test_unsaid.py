"""Nothing is said of a precision that the user did not choose."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelSummary

from lightning_accel import AccelPlugin
from support.lightning_models import Supervised, cnn, images

MakeTrainer = Callable[..., Any]


@pytest.fixture(autouse=True)
def _native_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any machine."""
    monkeypatch.setattr("lightning_accel.lightning.plugin.resolve_precision", lambda wanted, host: _resolved(wanted))


def _resolved(wanted: str) -> tuple[str, str]:
    return ("bf16-mixed", "a test says so") if wanted == "auto" else (wanted, "")


class Summarises(ModelSummary):
    """Makes a summary, and shows none."""

    @staticmethod
    def summarize(*_: Any, **__: Any) -> None: ...


def said(make_trainer: MakeTrainer, precision: str) -> list[str]:
    plugin = AccelPlugin(precision=precision, trust="checked", report=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        make_trainer(plugins=[plugin], callbacks=[Summarises()], max_steps=2).fit(Supervised(cnn()), images())
        assert warnings.filters == before
    return [str(one.message) for one in caught if "model summary" in str(one.message)]


def test_the_summary_does_not_warn_of_a_precision_that_nobody_chose(make_trainer: MakeTrainer) -> None:
    assert said(make_trainer, "auto") == []


def test_it_warns_of_one_that_the_user_chose(make_trainer: MakeTrainer) -> None:
    assert len(said(make_trainer, "bf16-mixed")) == 1
