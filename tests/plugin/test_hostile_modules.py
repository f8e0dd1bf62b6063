"""Whatever watches, counts, remembers or insists, in the user's code or a library's: a run with us is the plain run.

The same losses and weights, the same modules given back, and not one call that anybody could have seen.
"""

from __future__ import annotations

from typing import Any

import pytest

from lightning_accel import AccelPlugin
from lightning_accel.settings import Plan
from support.hostile_models import ROWS
from support.hostile_runs import differences, plain, train

SLOW = (
    *("hooks_that_keep_the_inputs_of_activations", "forward_hooks_with_keywords_that_are_always_called"),
    *("modules_that_set_attributes_in_their_own_way", "a_forward_that_is_static", "a_forward_that_is_wrapped"),
    *("appends_attention_weights_to_a_list", "keeps_the_weights_of_multihead_attention", "counts_calls_in_a_closure"),
    *("checkpointed_by_the_user", "modules_that_log", "draws_from_generators_of_its_own"),
    *("insists_on_contiguous_tensors", "views_what_a_convolution_returns", "writes_strides_down_without_asking"),
    *("reads_what_went_into_an_activation", "a_gru_over_packed_sequences", "a_scripted_activation"),
    *("a_scripted_submodule", "a_traced_submodule", "a_symbolically_traced_net", "weights_normed_in_the_old_way"),
    *("weights_with_spectral_norm_in_the_old_way", "weights_normed", "orthogonal_weights", "quantisation_stubs"),
)
"""Left to `make test-slow`: each has a neighbour in the table that does the same in another place, or does it later."""


def rows(*, only: str = "") -> Any:
    """The table, or the rows of which the trait is true."""
    chosen = {name: row for name, row in ROWS.items() if not only or getattr(row, only)}
    params = [
        pytest.param(
            name, marks=[*map(pytest.mark.filterwarnings, row.warns), *([pytest.mark.slow] if name in SLOW else [])]
        )
        for name, row in chosen.items()
    ]
    return pytest.mark.parametrize("name", params)


def accelerated(name: str, **settings: Any) -> Any:
    if name == "draws_random_numbers":  # for an image they fill it in the order of its memory: others in another layout
        settings["memory_format"] = "off"
    return train(ROWS[name], plugins=[AccelPlugin.from_plan(Plan().replace(precision="32-true", **settings))])


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
