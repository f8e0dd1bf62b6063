"""GpuStats, against cards that are simulated: real Trainer runs on a CPU, and NVML that answers as one of a GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_accel import AccelPlugin
from lightning_accel.callbacks import GpuStats, SpeedMemoryLogger
from lightning_accel.callbacks._nvml import Card, NoCardError
from lightning_accel.callbacks.gpu_stats import CardEpoch, put_together
from lightning_accel.evidence.events import MOST_OF_CARD
from lightning_accel.evidence.record_reader import read_record
from lightning_accel.evidence.render import to_html, to_markdown
from lightning_accel.evidence.report_model import page_of
from support.measured_runs import BATCH_SIZE, Model, loader
from support.simulated_nvml import SimulatedCard, SimulatedNvml, install

STEPS = 4


@pytest.fixture
def card() -> SimulatedCard:
    return SimulatedCard()


@pytest.fixture
def nvml(card: SimulatedCard, monkeypatch: pytest.MonkeyPatch) -> SimulatedNvml:
    """With one card, which the CPU is taken for, and which is asked after every step."""
    found = install(monkeypatch, card)
    monkeypatch.setattr(Card, "open", classmethod(lambda kind, device: kind.find("aaaa", 0)))
    monkeypatch.setattr("lightning_accel.callbacks.gpu_stats._EVERY_S", 0.0)
    return found


def fit(make_trainer: Any, model: Model | None = None, stats: GpuStats | None = None, **options: Any) -> Any:
    stats = GpuStats() if stats is None else stats
    validates = {"val_dataloaders": options.pop("validates")} if "validates" in options else {}
    trainer = make_trainer(callbacks=[stats], **options)
    trainer.fit(Model() if model is None else model, loader(STEPS), **validates)
    return stats, trainer


# -- what is logged --------------------------------------------------------------------------------------------------


def test_every_epoch_has_means_and_maxima_of_what_the_card_says(
    make_trainer: Any, nvml: SimulatedNvml, card: SimulatedCard
) -> None:
    def works(module: Model, batch_idx: int) -> None:
        card.sm_mhz = 1_000 + 100 * batch_idx
        card.energy_mj += 8_000

    stats, trainer = fit(make_trainer, Model(works))
    (found,) = stats.history
    assert found == {
        "accel/gpu/utilisation_percent_mean": 90,
        "accel/gpu/utilisation_percent_max": 90,
        "accel/gpu/memory_mib_mean": 1024,
        "accel/gpu/memory_mib_max": 1024,
        "accel/gpu/power_w_mean": 300,
        "accel/gpu/power_w_max": 300,
        "accel/gpu/sm_clock_mhz_mean": 1150,
        "accel/gpu/sm_clock_mhz_max": 1300,
        "accel/gpu/temperature_c_mean": 60,
        "accel/gpu/temperature_c_max": 60,
        "accel/gpu/throttled_frac": 0,
        "accel/gpu/energy_j_per_sample": 8 / BATCH_SIZE,
    }
    assert trainer.callback_metrics["accel/gpu/sm_clock_mhz_max"] == 1300
    assert nvml.opened == 0


def test_it_goes_to_the_logger(make_trainer: Any, nvml: SimulatedNvml, tmp_path: Path) -> None:
    fit(make_trainer, logger=CSVLogger(tmp_path))
    (file,) = tmp_path.rglob("metrics.csv")
    assert "accel/gpu/power_w_mean" in file.read_text()


def test_the_reason_of_throttling_is_logged_and_said_once(
    make_trainer: Any, nvml: SimulatedNvml, card: SimulatedCard
) -> None:
    def heats(module: Model, batch_idx: int) -> None:
        # Idle (0x1) is no throttling; power cap, and the card's own thermal slowdown, are.
        card.reasons = [0x1, 0x4, 0x4 | 0x40, 0x0][batch_idx]

    plugin = AccelPlugin(trust="checked", report=False)
    stats, _ = fit(make_trainer, Model(heats), max_epochs=2, plugins=[plugin])
    found = stats.history[-1]
    assert {name.rpartition("/")[2]: value for name, value in found.items() if "throttled" in name} == {
        "throttled_frac": 0.5,
        "throttled_frac_sw_power_cap": 0.5,
        "throttled_frac_hw_thermal_slowdown": 0.25,
    }
    said = [note for note in plugin.report.notes if "throttled" in note]
    assert [note.split(": ")[1].split(" (")[0] for note in said] == ["hw_thermal_slowdown", "sw_power_cap"]


@pytest.mark.medium
def test_clocks_and_throttling_of_a_simulated_card_are_shown_over_the_run(
    make_trainer: Any, nvml: SimulatedNvml, card: SimulatedCard, tmp_path: Path
) -> None:
    """In the second epoch it is too hot: clocks fall by half, and NVML says why."""

    class Heats(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            card.sm_mhz, card.reasons = (1_500, 0) if trainer.current_epoch == 0 else (750, 0x40)

    # GpuStats ends before the record is written.
    trainer = make_trainer(
        callbacks=[GpuStats(), SpeedMemoryLogger(), Heats()], logger=CSVLogger(tmp_path), max_epochs=2
    )
    trainer.fit(Model(), loader(8))
    record = read_record(tmp_path)
    assert all(len(values) <= MOST_OF_CARD for some in record.steps for values in some.card.values())
    page = page_of(record)
    clocks, throttled = (
        [value for _, value in page.curves[name]]
        for name in ("clock of the GPU, MHz", "share of the time in which its clocks were throttled")
    )
    assert (clocks[0], clocks[-1]) == (1_500, 750)
    assert (throttled[0], throttled[-1]) == (0, 1)
    assert [number for number, _ in page.curves["its power, W"]] == sorted(
        number for number, _ in page.curves["its power, W"]
    )
    for form in (to_html(page), to_markdown(page)):
        assert "clock of the GPU, MHz" in form


def test_what_nobody_takes_of_a_simulated_card_is_bounded(
    make_trainer: Any, nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_accel.callbacks.gpu_stats._MOST_UNTAKEN", 2)
    stats, _ = fit(make_trainer)
    assert {len(values) for values in stats.take_course().values()} == {2}
    assert stats.take_course() == {}


def test_energy_of_validation_is_not_that_of_training(
    make_trainer: Any, nvml: SimulatedNvml, card: SimulatedCard
) -> None:
    class Validates(Model):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            card.energy_mj += 1e9

    stats, _ = fit(make_trainer, Validates(), validates=loader(1), val_check_interval=2, num_sanity_val_steps=0)
    assert stats.history[0]["accel/gpu/energy_j_per_sample"] == 0


def test_a_card_is_asked_once_a_second_at_most(
    make_trainer: Any, nvml: SimulatedNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_accel.callbacks.gpu_stats._EVERY_S", 3600.0)
    asked: list[Card] = []
    monkeypatch.setattr(Card, "throttled_by", lambda card: asked.append(card))
    fit(make_trainer, max_epochs=2)
    assert len(asked) == 2  # at the first step of each epoch


def test_what_a_card_does_not_tell_is_left_out(make_trainer: Any, nvml: SimulatedNvml, card: SimulatedCard) -> None:
    card.unsupported = {"nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetPowerUsage"}
    stats, _ = fit(make_trainer)
    names = {name.rpartition("/")[2] for name in stats.history[0]}
    assert "temperature_c_mean" in names
    assert not names & {"energy_j_per_sample", "power_w_mean", "power_w_max"}


def test_drivers_before_535_call_reasons_by_another_name(card: SimulatedCard) -> None:
    card.unsupported, card.reasons = {"nvmlDeviceGetCurrentClocksEventReasons"}, 0x20
    assert Card(SimulatedNvml(card), card).throttled_by() == ["sw_thermal_slowdown"]


def test_cards_of_all_ranks_are_put_together() -> None:
    one = CardEpoch(values={"power_w": [100, 200]}, throttled_by=[[], ["sw_power_cap"]], energy_j=30, samples=4)
    other = CardEpoch(values={"power_w": [350]}, throttled_by=[[], []], energy_j=10, samples=4)
    assert put_together([one, other]) == {
        "accel/gpu/power_w_mean": 250,
        "accel/gpu/power_w_max": 350,
        "accel/gpu/throttled_frac": 0.25,
        "accel/gpu/throttled_frac_sw_power_cap": 0.25,
        "accel/gpu/energy_j_per_sample": 5,
    }


def test_energy_of_samples_is_unknown_where_one_rank_does_not_know_it() -> None:
    assert put_together([CardEpoch(energy_j=3, samples=4), CardEpoch(energy_j=None, samples=4)]) == {}


# -- which card ------------------------------------------------------------------------------------------------------


def test_a_card_is_found_by_its_uuid_whatever_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, SimulatedCard("GPU-bbbb", celsius=10), SimulatedCard("GPU-aaaa", celsius=20))
    with monkeypatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "1,0")
        assert Card.find("aaaa", 0).temperature_c() == 20


@pytest.mark.parametrize("uuid", ["aaaa", "cccc"], ids=["CUDA has that of the card", "CUDA has that of the instance"])
def test_an_instance_of_mig_has_memory_of_its_own_and_the_clocks_of_its_card(
    uuid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = SimulatedCard("GPU-aaaa", is_divided=True, sm_mhz=1_700, used_mib=70_000)
    install(monkeypatch, whole, SimulatedCard("MIG-cccc", whole=whole, sm_mhz=0, used_mib=512))
    with monkeypatch.context() as patched:
        patched.setenv("CUDA_VISIBLE_DEVICES", "MIG-cccc")
        card = Card.find(uuid, 0)
    assert (card.memory_mib(), card.sm_clock_mhz()) == (512, 1_700)
    assert (card.power_w(), card.energy_j(), card.utilisation_percent()) == (None, None, None)


def test_a_divided_card_whose_instance_is_not_named_is_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = install(monkeypatch, SimulatedCard("GPU-aaaa", is_divided=True))
    with monkeypatch.context() as patched:
        patched.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        with pytest.raises(NoCardError, match="name the instance in CUDA_VISIBLE_DEVICES=MIG-"):
            Card.find("aaaa", 0)
    assert nvml.opened == 0


# -- without one -----------------------------------------------------------------------------------------------------


def said_without(make_trainer: Any) -> str:
    plugin = AccelPlugin(trust="checked", report=False)
    stats, trainer = fit(make_trainer, max_epochs=2, plugins=[plugin])
    assert (trainer.global_step, stats.history) == (2 * STEPS, [])
    (note,) = (note for note in plugin.report.notes if "GpuStats" in note)
    return note


def test_a_run_on_a_cpu_is_told_once(make_trainer: Any) -> None:
    assert "this run is on cpu, and NVML knows NVIDIA's cards only" in said_without(make_trainer)


def test_a_machine_without_nvml_is_told_what_to_install(make_trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Card, "open", classmethod(lambda kind, device: kind.find("aaaa", 0)))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "pip install nvidia-ml-py" in said_without(make_trainer)


@pytest.mark.parametrize(("has_driver", "why"), [(False, "Library Not Found"), (True, "with UUID aaaa: Not Found")])
def test_a_machine_without_a_driver_or_with_another_card_is_told_so(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch, has_driver: bool, why: str
) -> None:
    install(monkeypatch, SimulatedCard("GPU-bbbb"), has_driver=has_driver)
    monkeypatch.setattr(Card, "open", classmethod(lambda kind, device: kind.find("aaaa", 0)))
    assert why in said_without(make_trainer)


def test_nvml_is_let_go_of_after_an_exception(make_trainer: Any, nvml: SimulatedNvml) -> None:
    def fail(module: Model, batch_idx: int) -> None:
        assert nvml.opened == 1
        raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        fit(make_trainer, Model(fail))
    assert nvml.opened == 0


@pytest.mark.needs_kernels("NVML")
@pytest.mark.gpu
def test_a_real_card_answers(make_trainer: Any) -> None:
    pytest.importorskip("pynvml")
    stats, _ = fit(make_trainer, accelerator="gpu")
    assert stats.history[0]["accel/gpu/memory_mib_max"] > 0
    assert torch.cuda.is_initialized()
