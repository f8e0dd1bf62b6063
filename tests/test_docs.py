"""Every block of code in README.md and docs/ runs, and every setting it names exists."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from lightning_accel import Plan
from lightning_accel.arguments import arguments
from lightning_accel.cli.tune_command import TuneOptions

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


PAGES = {"README.md": README, **{p.name: p.read_text(encoding="utf-8") for p in (ROOT / "docs").glob("*.md")}}


def blocks(language: str) -> list[object]:
    return [
        pytest.param(block, id=f"{name}, {index}")
        for name, text in PAGES.items()
        for index, block in enumerate(re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL))
    ]


@pytest.mark.usefixtures("techniques_restored")
@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # where dataclasses look up their annotations
    exec(compile(code, "a block of the page", "exec"), vars(module))
    printed = capsys.readouterr().out
    assert printed
    assert "lightning-accel on" in printed or not re.search(r"AccelPlugin\(|accelerate\(|strategy=", code)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_blocks_are_settings(text: str) -> None:
    config = yaml.safe_load(text)
    if "tuning" in config:
        assert TuneOptions(**config["tuning"])
        return
    settings = config["accel"] if "accel" in config else config["trainer"]["plugins"][0]["init_args"]
    assert Plan.from_dict(settings)


def test_every_setting_is_described() -> None:
    missing = [name for name in arguments() if f"`{name}`" not in README]
    assert missing == []


def test_linked_files_exist() -> None:
    for name, text in PAGES.items():
        folder = ROOT if name == "README.md" else ROOT / "docs"
        links = re.findall(r"\]\(([^)#:]+)\)", text)
        assert [link for link in links if not (folder / link).exists()] == []


def test_the_figures_are_those_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure in the pages is by hand: they are what ``benchmarks/render.py`` makes of the measurements' files."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    render = runpy.run_path(str(ROOT / "benchmarks" / "render.py"))
    assert render["readme"]() == README
    assert render["tuning_page"]() == PAGES["tuning.md"]
    assert render["results_page"]() == (ROOT / "docs" / "results" / "README.md").read_text(encoding="utf-8")
    for name, (draw, _) in render["PLOTS"].items():
        assert draw() == (ROOT / "docs" / "results" / f"{name}.svg").read_text(encoding="utf-8")
