"""Takes the pictures of docs/report.md: the beginning of a real run's report, in light and in dark.

    python benchmarks/_report_pictures.py

trains a small bytes GPT of examples/ for half a minute and opens its report in Chromium; it needs ``.[boards,report]``.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from io import BytesIO
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from playwright.sync_api import sync_playwright

from bytes_gpt import BytesGPT, StdlibText
from lightning_accel import AccelPlugin

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
SIZE = {"width": 1000, "height": 1160}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_COLORS = 128  # are enough for a page, and half of the bytes
STEPS = 200


def train(folder: Path) -> Path:
    """Trains, and returns the report."""
    seed_everything(0)
    torch.set_num_threads(1)  # the other cores are somebody else's, on a machine that is shared
    report = folder / "report.html"
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        plugins=[AccelPlugin(report=report)], logger=CSVLogger(folder), max_steps=STEPS, limit_val_batches=0, **quiet
    )
    trainer.fit(BytesGPT(dim=128, depth=2), datamodule=StdlibText(batch_size=4))
    return report


def picture(report: Path, colors: str, target: Path) -> None:
    """Writes what a browser shows of the report at first."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        raise SystemExit(f"needs a browser, one of {', '.join(BROWSERS)}: apt-get install chromium, say")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme=colors)
        page.goto(report.as_uri())
        shot = Image.open(BytesIO(page.screenshot()))
        browser.close()
    shot.convert("RGB").quantize(_COLORS).save(target, optimize=True)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        report = train(Path(folder))
        for colors in ("light", "dark"):
            picture(report, colors, FOLDER / f"report-{colors}.png")


if __name__ == "__main__":
    main()
