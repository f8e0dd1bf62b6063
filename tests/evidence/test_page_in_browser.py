"""The HTML page in a real browser: that it shows, sorts, unfolds and prints, for everybody, and asks nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from evidence.test_render import everything
from evidence.test_report_model import huge
from lightning_accel.evidence.render import write
from lightning_accel.evidence.report_model import Page, page_of
from support.browser import a_browser
from support.reported_runs import PEAKS, record_of, told

pytestmark = pytest.mark.browser

Open = Callable[..., Any]


def pages() -> dict[str, Page]:
    """Those that are looked at: of a run with something for each part, of one without memory, of a huge one."""
    full = page_of(everything(), peaks=PEAKS)
    findings = page_of(record_of()).findings
    return {
        "full": replace(full, findings=[*findings, *findings]),
        "out of memory": page_of(record_of(page="CUDA out of memory.\n\nStep 3 did not fit\n\nWho asked:\n  head")),
        "huge": page_of(huge(), peaks=PEAKS),
        "plain": page_of(record_of(**told(compile={}), epochs=[]), peaks=PEAKS),
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {name: folder / f"{name}.html" for name in pages()}
    for name, page in pages().items():
        write(page, found[name])
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with a_browser() as browser:
        yield browser


@pytest.fixture
def show(browser: Any, files: dict[str, Path]) -> Iterator[Open]:
    """Opens a page; afterwards, nothing has been complained of, nor asked for from elsewhere."""
    contexts, complaints, asked = [], [], []

    def opened(name: str = "full", **options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(files[name].as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in asked if not url.startswith(("file://", "data:"))] == []


NAMES = ("full", "out of memory", "huge", "plain")


@pytest.mark.parametrize("name", NAMES)
def test_it_shows_what_it_has_without_a_complaint_or_a_request(show: Open, name: str) -> None:
    page = show(name)
    assert page.title() == page.locator("h1").inner_text()
    assert page.locator("h2").count() > 2


@pytest.mark.parametrize("colors", ["light", "dark"])
@pytest.mark.parametrize("name", ["full", "out of memory", "plain"])  # the huge one has more of the same
def test_axe_finds_nothing_serious(show: Open, name: str, colors: str) -> None:
    pytest.importorskip("axe_core_python", reason="needs axe: make test-browser")
    page = show(name, color_scheme=colors)
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    page.evaluate((resources.files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run().then(result => result.violations)")
    told = [(one["id"], one["impact"], [node["html"][:200] for node in one["nodes"][:3]]) for one in found]
    assert [one for one in told if one[1] in ("serious", "critical")] == []


def column(page: Any, table: str, place: int) -> list[str]:
    found: list[str] = page.locator(f"[aria-label='{table}'] tbody tr td:nth-child({place})").all_inner_texts()
    return found


def test_a_click_on_a_head_sorts_by_numbers_and_another_turns_them_round(show: Open) -> None:
    page = show("huge")
    page.locator("details").evaluate_all("all => all.forEach(one => { one.open = true; })")
    head = page.locator("[aria-label='Epochs'] th button", has_text="steps/s")
    head.click()
    falling = [float(text.replace(",", "")) for text in column(page, "Epochs", 2)]
    assert falling == sorted(falling, reverse=True) != []
    head.click()
    assert [float(text.replace(",", "")) for text in column(page, "Epochs", 2)] == falling[::-1]


def test_keys_sort_too_and_say_in_which_order(show: Open) -> None:
    page = show()
    head = page.locator("[aria-label='Memory at the peak'] th").first
    head.locator("button").focus()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "ascending"
    names = column(page, "Memory at the peak", 1)
    assert names == sorted(names)
    assert page.locator("[aria-label='Memory at the peak'] tfoot td").first.inner_text() == "all tensors"


def test_modules_unfold_as_deep_as_one_clicks_and_by_keys(show: Open) -> None:
    page = show("huge")
    module = page.locator(".tree details:not([open])").first.element_handle()
    part, summary = module.query_selector(".leaf"), module.query_selector("summary")
    assert not part.is_visible()
    summary.click()
    assert part.is_visible()
    summary.focus()
    page.keyboard.press("Enter")
    assert not part.is_visible()


def test_without_javascript_every_number_is_there(show: Open) -> None:
    page = show(java_script_enabled=False)
    for table in ("Parts of a step", "Live trials", "Memory at the peak", "Layout copies", "Over the run", "Machine"):
        assert page.locator(f"[aria-label='{table}'] td").first.is_visible()
    page.locator("summary", has_text="As a table").click()
    assert page.locator("[aria-label='Modules beside the limits of the machine'] td").first.is_visible()


@pytest.mark.parametrize("name", NAMES)
def test_on_a_phone_the_page_does_not_scroll_sideways(show: Open, name: str) -> None:
    page = show(name, viewport={"width": 390, "height": 800})
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("scripts", [True, False], ids=["with scripts", "without"])
def test_on_paper_everything_is_unfolded(show: Open, scripts: bool) -> None:
    page = show(java_script_enabled=scripts)
    page.emulate_media(media="print")
    folded = page.locator("details:not([open])")
    assert folded.count() > 3
    assert all(one.bounding_box()["height"] > 10 for one in folded.locator("> :not(summary)").all() if one.inner_text())
    assert page.pdf()[:4] == b"%PDF"
