"""What is declared of every technique holds: what it does by itself, that it has been tried."""

from __future__ import annotations

import inspect

import pytest

from lightning_accel.techniques.base import Technique
from lightning_accel.techniques.registry import Declaration, declarations
from support.technique_table import table

SHOWN = {name for row in table().values() for name in row.settings}

every_technique = pytest.mark.parametrize("declaration", declarations().values(), ids=declarations())


@every_technique
def test_what_changes_training_is_off_by_default_and_never_on_live_trial(declaration: Declaration) -> None:
    if declaration.exactness == "changes training":
        assert declaration.is_off(declaration.default)
        assert "Live(" not in inspect.getsource(declaration.technique)


@every_technique
def test_the_tests_of_all_techniques_have_a_row_of_it(declaration: Declaration) -> None:
    assert declaration.name in SHOWN


def test_the_protocol_is_twelve_names() -> None:
    names = {name for name in {*vars(Technique), *Technique.__annotations__} if not name.startswith("_")}
    assert len(names) <= 12, sorted(names)
