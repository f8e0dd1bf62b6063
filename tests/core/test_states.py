"""The states of sites and techniques: the tables are those of the page, and nothing goes past them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from lightning_accel.core.measured import Measurement
from lightning_accel.core.report import TechniqueReport
from lightning_accel.core.states import SITE_CHANGES, TECHNIQUE_CHANGES, Sites, SiteState, TechniqueState, VerdictKind

PAGE = (Path(__file__).parents[2] / "docs" / "states.md").read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The rows of the first table under a heading of the page."""
    lines = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return rows[2:]


def rows(changes: Mapping[Any, Sequence[str]]) -> list[list[str]]:
    return [[before or "—", after] for before, others in changes.items() for after in others]


def test_the_page_has_the_tables_of_the_code() -> None:
    for heading, changes in (("Sites", SITE_CHANGES), ("Techniques", TECHNIQUE_CHANGES)):
        assert [row[:2] for row in table(heading)] == rows(changes)
        assert all(when for _, _, when in table(heading))
    assert [kind for kind, _ in table("Verdicts")] == list(get_args(VerdictKind))


def sites_in(before: SiteState | None) -> Sites:
    sites = Sites("fake")
    if before is not None:
        sites.change("a", before, "first", Measurement(error=1.0))
    return sites


@pytest.mark.parametrize(("before", "after"), [*itertools.product([None, *get_args(SiteState)], get_args(SiteState))])
def test_a_site_changes_as_the_table_says_and_in_no_other_way(before: SiteState | None, after: SiteState) -> None:
    sites = sites_in(before)
    if after not in SITE_CHANGES[before]:
        with pytest.raises(ValueError, match=f"'a' cannot change from {before} to {after}"):
            sites.change("a", after)
        return
    changed = sites.change("a", after, "second")
    assert (changed.technique, changed.site, changed.before, changed.after) == ("fake", "a", before, after)
    assert sites.reasons(after) == {"a": "second"}
    assert sites["a"].measured == (None if before is None else Measurement(error=1.0))  # what is known stays known


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(get_args(TechniqueState), 2)])
def test_a_technique_changes_as_the_table_says_and_in_no_other_way(
    before: TechniqueState, after: TechniqueState
) -> None:
    record = TechniqueReport("fake", before, "as it was")
    if after not in TECHNIQUE_CHANGES.get(before, ()):
        with pytest.raises(AssertionError):
            record.change(after, "other")
        assert (record.state, record.status) == (before, "as it was")
        return
    record.change(after)
    assert (record.state, record.status) == (after, "as it was")


def test_sites_of_a_state_are_in_the_order_in_which_they_came_to_it() -> None:
    sites = Sites("fake")
    for site in "abc":
        sites.change(site, "PROPOSED")
    for site in "cab":
        sites.change(site, "ON")
    sites.change("a", "ON", "anew")
    assert list(sites.reasons("ON")) == ["c", "a", "b"]
