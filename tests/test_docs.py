"""Every block of code in the pages runs, every link leads somewhere, every page can be found."""

from __future__ import annotations

import importlib.util
import re
import runpy
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import lightning_accel
import lightning_accel.callbacks
import lightning_accel.data
import lightning_accel.deploy
import lightning_accel.ops
import lightning_accel.techniques
from lightning_accel import Plan
from lightning_accel.__main__ import main
from lightning_accel.arguments import DEFAULTS
from lightning_accel.cli.tune_command import TuneOptions
from lightning_accel.techniques.registry import declarations

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

# Not what a GPU benchmark wrote: its table is in docs/results/README.md.
WRITTEN = [path for path in sorted(DOCS.rglob("*.md")) if not path.match("results/gpu-*.md")]
FILES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *WRITTEN)
PAGES = {path: path.read_text(encoding="utf-8") for path in FILES}
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
BLOCK = re.compile(r"^ *```(\S*)\n(.*?)^ *```$", flags=re.DOTALL | re.MULTILINE)


def blocks(*languages: str) -> list[Any]:
    return [
        pytest.param(block, id=f"{path.relative_to(ROOT)}, {index}")
        for path, text in PAGES.items()
        for index, block in enumerate(block for language, block in BLOCK.findall(text) if language in languages)
    ]


@pytest.mark.usefixtures("techniques_restored")
@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if "AccelXLAPlugin(" in code and importlib.util.find_spec("torch_xla") is None:
        pytest.skip("needs torch_xla: make test-xla runs it")
    module = ModuleType("__main__")  # as the script that its reader makes of it
    monkeypatch.setitem(sys.modules, "__main__", module)  # where dataclasses look up their annotations
    exec(compile(code, "a block of the page", "exec"), vars(module))
    printed = capsys.readouterr().out
    assert printed
    assert "lightning-accel on" in printed or not re.search(r"Accel(XLA)?Plugin\(|accelerate\(|strategy=", code)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_blocks_are_settings(text: str) -> None:
    config = yaml.safe_load(text)
    if "tuning" in config:
        assert TuneOptions(**config["tuning"])
        return
    settings = config["accel"] if "accel" in config else config["trainer"]["plugins"][0]["init_args"]
    assert Plan.from_dict(settings)


def test_every_other_block_says_that_it_does_not_run() -> None:
    """A spelling that no test looks for would be a block that nobody runs."""
    languages = {language for text in PAGES.values() for language, _ in BLOCK.findall(text)}
    assert languages <= {"python", "yaml", "yml", "console", "text", "toml"}


@pytest.mark.parametrize("text", blocks("console"))
def test_commands_exist(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    (subcommands,) = re.findall(r"\{(\S+)\}", capsys.readouterr().out.split("\n\n")[0])
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"^lightning-accel ([a-z]+)", text, flags=re.MULTILINE)) <= set(subcommands.split(","))
    assert set(re.findall(r"^make ([a-z-]+)", text, flags=re.MULTILINE)) <= targets


def test_links_lead_to_files_and_headings() -> None:
    """As GitHub has them; ``make docs`` asks the same of the site."""
    astray = [f"{path.relative_to(ROOT)}: {link}" for path, text in PAGES.items() for link in _astray(path, text)]
    assert astray == []


def _astray(path: Path, text: str) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s:]+)\)", BLOCK.sub("", text)):
        name, _, heading = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or (heading and heading not in _headings(PAGES[target])):
            yield link


def _headings(text: str) -> set[str]:
    lines = re.findall(r"^#+ (.+)$", BLOCK.sub("", text), flags=re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines}
    return slugs | set(re.findall(r'<a id="([^"]+)">', text))


NOT_BY_HAND = DOCS / "claims.md"  # `lightning-accel claims` writes it as a whole


@pytest.mark.parametrize("path", [path for path in FILES if path != NOT_BY_HAND], ids=lambda path: path.name)
def test_the_median_sentence_of_a_page_has_under_18_words(path: Path) -> None:
    assert statistics.median(len(sentence.split()) for sentence in _sentences(PAGES[path])) < 18


def _sentences(text: str) -> list[str]:
    """The sentences of a page, without code, tables, headings, the targets of links and what a script writes."""
    text = re.sub(r"<!-- (\w+):begin.*?<!-- \1:end -->", "", BLOCK.sub("", text), flags=re.DOTALL)
    text = re.sub(r"^ *(\||#|!\[|:::|<).*$|(?<=\])\([^)]*\)", "", text, flags=re.MULTILINE)
    paragraphs = re.split(r"\n\s*\n|^ *(?:[-*]|\d+\.) ", text, flags=re.MULTILINE)
    ends = re.compile(r"(?<=[.!?])[*)\"]*\s+|(?<=[:;])\s+(?=[A-Z`*\"])")
    return [sentence for part in paragraphs for sentence in ends.split(part) if len(sentence.split()) > 2]


def test_every_page_is_in_the_nav() -> None:
    def pages(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for part in entry.values() if isinstance(entry, dict) else entry:
                yield from pages(part)

    listed = list(pages(SITE["nav"]))
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in PAGES if path.is_relative_to(DOCS))


@pytest.mark.parametrize("name", declarations())
def test_every_technique_has_a_page_that_says_when_and_when_not(name: str) -> None:
    text = PAGES[DOCS / "techniques" / f"{name}.md"]
    assert text.startswith(f"# `{name}`: ")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)
    said = {section.partition("\n")[0]: section.partition("\n")[2].strip() for section in sections}
    for heading in ("When it helps", "When it does not", "Measured", "Sources"):
        assert said[heading]


def test_every_setting_is_described() -> None:
    settings = PAGES[DOCS / "reference" / "settings.md"]
    assert [name for name in DEFAULTS if f"`{name}`" not in settings] == []


def test_every_public_name_is_in_the_reference() -> None:
    folder = DOCS / "reference"
    shown = {name for path in folder.glob("*.md") for name in re.findall(r"^::: ([\w.]+)$", PAGES[path], re.MULTILINE)}
    last = {name.rpartition(".")[2] for name in shown}
    packages = (
        *(lightning_accel, lightning_accel.callbacks, lightning_accel.data, lightning_accel.deploy),
        lightning_accel.techniques,
    )
    public = {name for package in packages for name in package.__all__}
    assert public - last == set()
    functions = {f"lightning_accel.ops.{name}" for name in lightning_accel.ops.__all__ if name != "gaussian"}
    functions |= {f"lightning_accel.ops.gaussian.{name}" for name in lightning_accel.ops.gaussian.__all__}
    assert functions - shown == set()


def test_the_figures_are_those_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure in the pages is by hand: they are what ``benchmarks/render.py`` makes of the measurements' files."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    render = runpy.run_path(str(ROOT / "benchmarks" / "render.py"))
    for path, text in render["pages"]().items():
        assert text == PAGES[path], f"{path.relative_to(ROOT)}: python benchmarks/render.py writes it anew"
    for name, (draw, _) in render["PLOTS"].items():
        assert draw() == (DOCS / "results" / f"{name}.svg").read_text(encoding="utf-8")
