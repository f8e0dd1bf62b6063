"""TensorBoard itself, opened on a run in a real browser: what lightning-accel has written is what a person sees."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_accel.callbacks import SpeedMemoryLogger
from support.browser import a_browser
from support.live_runs import Timed, fit, simulated

pytestmark = pytest.mark.browser

PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a TensorBoard shows a run whose live trials have settled."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch, simulated(1.5) as passing:
        patch.setenv("LIGHTNING_ACCEL_CACHE", str(folder / "remembered"))
        patch.chdir(folder)
        measured, board = SpeedMemoryLogger(every_s=0.0), TensorBoardLogger(folder / "logs", name="")
        fit(Timed(passing), 100, logger=board, callbacks=[measured], max_epochs=2)
    command = [sys.executable, "-m", "tensorboard.main", f"--logdir={folder / 'logs'}", "--load_fast=false"]
    with (folder / "said.txt").open("w") as said:  # at which port: a free one
        server = subprocess.Popen([*command, "--host=127.0.0.1", "--port=0"], stdout=said, stderr=said)
    try:
        yield _when_up(server, folder / "said.txt")
    finally:
        server.terminate()
        server.wait()


def _when_up(server: subprocess.Popen[bytes], said: Path) -> str:
    give_up_at = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up_at and server.poll() is None:
        found = [word for word in said.read_text().split() if word.startswith("http://127.0.0.1:")]
        if found and _has_read_the_run(found[0]):
            return found[0]
        time.sleep(0.2)
    pytest.fail(f"TensorBoard does not answer:\n{said.read_text()}")


def _has_read_the_run(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}data/runs") as answer:
            return b"version_0/accel" in answer.read()
    except OSError:
        return False


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """A page of a headless browser."""
    with a_browser() as browser:
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        page.set_default_timeout(1e3 * PATIENCE_S)
        yield page


def show(page: Any, address: str, tab: str) -> None:
    page.goto("about:blank")  # else it would be the same page, which is not loaded anew
    page.goto(f"{address}#{tab}")


def test_the_text_tab_shows_what_the_run_has_come_to(page: Any, address: str) -> None:
    show(page, address, "text")
    page.get_by_text("accel/summary/text_summary").first.wait_for()
    page.get_by_text("whole plan faster").first.wait_for()
    page.locator("strong", has_text="over plain, peak").first.wait_for()


def test_the_hparams_tab_shows_the_settings_and_the_speed_ratio(page: Any, address: str) -> None:
    show(page, address, "hparams")
    for words in ("accel/precision", "32-true", "accel/run/speed_ratio", "version_0/accel"):
        page.get_by_text(words).first.wait_for()


def test_the_custom_scalars_tab_shows_groups_of_charts_with_a_line_in_each(page: Any, address: str) -> None:
    show(page, address, "custom_scalars")
    for words in ("accel: speed", "accel: step times", "accel: memory", "accel: waiting", "samples per second"):
        page.get_by_text(words, exact=True).first.wait_for()
    page.get_by_text("Matches (1)").first.wait_for()
    assert page.get_by_text("Matches (0)").count() == 0


def test_the_images_tab_shows_where_a_steps_time_goes(page: Any, address: str) -> None:
    pytest.importorskip("matplotlib")
    show(page, address, "images")
    page.get_by_text("accel/step_time").first.wait_for()
    image = page.locator("tf-image-loader img").first
    image.wait_for()
    assert image.evaluate("image => image.decode().then(() => image.naturalWidth)") > 500
