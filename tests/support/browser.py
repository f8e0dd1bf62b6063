"""A real browser without a window, where there is one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def a_browser() -> Iterator[Any]:
    """Chromium, driven by playwright; a test is skipped where either is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs a browser's driver: make test-browser")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"needs a browser, one of {', '.join(BROWSERS)}: apt-get install chromium, say")
    sandbox = ["--no-sandbox"] if os.getuid() == 0 else []  # which root has none of
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=sandbox)
        yield browser
        browser.close()
