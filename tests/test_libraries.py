"""Libraries that make the Trainer themselves, of ``pytorch_lightning``, given the plugin through their own arguments.

Not among what a clone installs: make test-libraries. How fast they are with it: benchmarks/downstream.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_accel import AccelPlugin

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]  # theirs are not ours to mend

QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
QUIET |= {"logger": False, "enable_checkpointing": False}


@pytest.fixture(autouse=True)
def _drawn_data_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")


def edited(plugin: Any) -> dict[str, Any]:
    """What it did, and did not only watch: by technique."""
    return {name: each.changes for name, each in plugin.report.techniques.items() if each.changes}


def test_neuralforecast() -> None:
    pytest.importorskip("neuralforecast")
    from _downstream_data import frame
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS

    plugin = AccelPlugin(precision="32-true", tune="off", optimizer="on")
    model = NHITS(h=12, input_size=48, max_steps=20, plugins=[plugin], **QUIET)
    forecast = NeuralForecast([model], freq="h")
    forecast.fit(frame())
    assert "optimizer" in edited(plugin)
    assert len(forecast.predict()) == 8 * 12


@pytest.mark.parametrize("arguments", [{"strategy": "accel"}, {"plugins": [AccelPlugin()], "precision": None}])
def test_darts(arguments: dict[str, Any]) -> None:
    """It tells the Trainer its precision: a strategy brings the plugin, or the library's precision is taken back."""
    pytest.importorskip("darts")
    from _downstream_data import wave
    from darts.models import NBEATSModel

    model = NBEATSModel(
        input_chunk_length=36, output_chunk_length=12, n_epochs=2, pl_trainer_kwargs={**QUIET, **arguments}
    )
    model.fit(wave())
    assert isinstance(model.trainer.precision_plugin, AccelPlugin)
    assert len(model.predict(12)) == 12


def test_no_library_has_had_the_other_package_imported() -> None:
    assert "pytorch_lightning" in sys.modules
