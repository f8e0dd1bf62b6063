"""What is declared of every technique holds: what it does by itself, where it is described, that it has been tried."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_accel.techniques.base import Technique
from lightning_accel.techniques.registry import Declaration, declarations
from support.technique_table import table

README = Path(__file__).parents[2] / "README.md"

every_technique = pytest.mark.parametrize("declaration", declarations().values(), ids=declarations())


@every_technique
def test_what_changes_training_is_off_by_default_and_never_on_live_trial(declaration: Declaration) -> None:
    if declaration.exactness == "changes training":
        assert declaration.is_off(declaration.default)
        assert declaration.technique.arms is Technique.arms


@every_technique
def test_the_readme_says_what_it_does_to_numbers_when_it_helps_and_when_not(declaration: Declaration) -> None:
    section = README.read_text(encoding="utf-8").split("\n## Techniques\n")[1].split("\n## ")[0]
    rows = {re.sub("`", "", row[1]).strip(): row for line in section.splitlines() if (row := line.split("|"))[2:]}
    _, _, default, numbers, *words = rows[declaration.name][:-1]
    assert f"`{declaration.write(declaration.default) or []}`" in default
    assert numbers.strip().partition(";")[0] == declaration.exactness
    assert len(words) == 3
    assert all(word.strip() for word in words)


@every_technique
def test_the_tests_of_all_techniques_have_a_row_of_it(declaration: Declaration) -> None:
    assert declaration.name in {name for row in table().values() for name in row.settings}
