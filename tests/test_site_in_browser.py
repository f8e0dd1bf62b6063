"""The site that ``make docs`` builds, opened from its folder in a real browser."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.browser import a_browser

pytestmark = pytest.mark.browser


def test_search_works_in_a_folder_and_asks_nobody_else(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", tmp_path], cwd=root, check=True)
    asked = []
    with a_browser() as browser:
        page = browser.new_context(offline=True).new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "index.html").as_uri())
        page.click("input.md-search__input")
        page.keyboard.type("gradient checkpointing")
        page.wait_for_selector(".md-search-result__link")
        found = [link.get_attribute("href") for link in page.locator(".md-search-result__link").all()]
    assert any("techniques/gradient_checkpointing.html" in link for link in found)
    assert all(url.startswith("file:") for url in asked)
