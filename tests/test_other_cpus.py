"""``make test-cpus`` runs every module of tests that compares numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from as_other_cpus import probe

TESTS = Path(__file__).parent
COMPARES = re.compile(
    r"\b(assert_close|assert_allclose|assert_array_equal|allclose|array_equal|relative_error|assert_same)\b"
    r"|torch\.equal\("
)
MARKED = re.compile(r"^pytestmark = [^\n]*(\n[ \])][^\n]*)*?pytest\.mark\.(numbers|gpu)", re.MULTILINE)

pytestmark = pytest.mark.numbers


def test_modules_that_compare_numbers_are_marked() -> None:
    sources = {path.relative_to(TESTS): path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py")}
    unmarked = [str(path) for path, source in sources.items() if COMPARES.search(source) and not MARKED.search(source)]
    assert not unmarked, f"put `pytestmark = pytest.mark.numbers` below the imports of {', '.join(unmarked)}"


def test_a_processor_computes_the_same_bits_twice() -> None:
    """Else no setting would ever be seen to change nothing."""
    assert probe() == probe()
