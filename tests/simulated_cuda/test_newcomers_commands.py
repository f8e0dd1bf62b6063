"""What somebody new asks of the command line on a GPU: ``doctor``, ``report``, ``tune``, and the demo."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_accel import AccelPlugin
from lightning_accel.__main__ import main
from lightning_accel.callbacks import SpeedMemoryLogger
from simulated_cuda.programs import run
from support.reported_runs import Nested, vectors

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.simulated_gpu

DEMO = """
import sys
sys.path.insert(0, {examples!r})
import demo
if __name__ == "__main__":
    demo.SIZES = {{"digits": {{"size": 16, "batch_size": 8}}, "bytes_gpt": {{"seq_len": 32, "batch_size": 2}}}}
    sys.argv[1:] = ["--rounds", "1", "--batches", "4", "--accelerator", "gpu"]
    demo.main()
"""

TUNE = """
import sys
from lightning_accel import AccelCLI
from support.search_runs import Samples, Sleeper
if __name__ == "__main__":
    shared = ["--trainer.accelerator=gpu", "--trainer.max_epochs=2", "--trainer.logger=false", "--model.step_s=0.05"]
    shared += ["--trainer.enable_checkpointing=false", "--data.batch_size=16", "--accel.compile=off"]
    for command in (["tune", "--time=60s", "--out=found.yaml"], ["fit", "--config=found.yaml"]):
        sys.argv[1:] = [*command[:1], *shared, *command[1:]]
        cli = AccelCLI(Sleeper, Samples, save_config_callback=None)
    print("trained with", cli.datamodule.batch_size, "on", cli.trainer.strategy.root_device)
"""


def test_doctor_describes_the_card_and_what_a_run_on_it_would_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "NVIDIA H100" in said
    assert "precision='auto'" in said


def test_report_makes_the_page_of_a_run_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_steps=60,
        logger=CSVLogger(tmp_path),
        plugins=[AccelPlugin(precision="32-true")],
        callbacks=[SpeedMemoryLogger()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Nested(), vectors(60))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "report.html")]) == 0
    assert capsys.readouterr().out.startswith("A run of 60 steps")
    assert "NVIDIA H100" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_demo_comes_to_its_table(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("tensorboard")
    program = DEMO.format(examples=str(ROOT / "examples"))
    ended = run(tmp_path, program, "simulated_cuda", timeout_s=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "NVIDIA H100" in ended.stdout.splitlines()[0]
    assert ended.stdout.count("samples/s") == 2


@pytest.mark.slow
def test_tune_finds_a_batch_that_fit_then_trains_with(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    ended = run(tmp_path, TUNE, "simulated_cuda", timeout_s=400)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == "trained with 32 on cuda:0", ended.stdout + ended.stderr
