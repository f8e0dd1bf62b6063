"""Whatever watches, counts, remembers or insists, in the user's code or a library's: a run with us is the plain run.

The same losses and weights, the same modules given back, and not one call that anybody could have seen.
"""

from __future__ import annotations

from typing import Any

import pytest

from lightning_accel import AccelPlugin
from support.hostile_models import ROWS
from support.hostile_runs import differences, plain, train


def rows(*, only: str = "") -> Any:
    """The table, or the rows of which the trait is true."""
    chosen = {name: row for name, row in ROWS.items() if not only or getattr(row, only)}
    return pytest.mark.parametrize(
        "name",
        [pytest.param(name, marks=[pytest.mark.filterwarnings(w) for w in row.warns]) for name, row in chosen.items()],
    )


def accelerated(name: str, **settings: Any) -> Any:
    if name == "draws_random_numbers":  # for an image they fill it in the order of its memory: others in another layout
        settings["memory_format"] = "off"
    return train(ROWS[name], plugins=[AccelPlugin(precision="32-true", **settings)])


# A step that only an edit of ours makes raise is said in a warning, and repeated.
@pytest.mark.filterwarnings("ignore:a step raised:lightning_accel.AccelWarning")
@rows()
def test_it_trains_as_it_does_plain(name: str) -> None:
    assert differences(accelerated(name), plain(ROWS[name])) == []


# What was asked for and has no site in one of these models is said in a warning, which is right.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning_accel.AccelWarning")
@rows()
def test_it_trains_as_it_does_plain_with_memory_saved_too(name: str) -> None:
    settings = {
        "flash_attention": "off",  # as hostile with it as without, and tried above
        "memory_format": "channels_last",
        "sparse_activations": "auto",
        "activation_offloading": {"to": "disk", "min_bytes": 1},
    }
    assert differences(accelerated(name, **settings), plain(ROWS[name])) == []


@pytest.mark.filterwarnings("ignore::lightning_accel.AccelWarning")
@rows(only="recomputed")
def test_it_trains_as_it_does_plain_with_blocks_computed_twice(name: str) -> None:
    run = accelerated(name, flash_attention="off", gradient_checkpointing="full")
    assert differences(run, plain(ROWS[name])) == []
