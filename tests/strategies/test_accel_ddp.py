"""DDP is set up by what the first step shows."""

from __future__ import annotations

import pytest
import torch

from lightning_accel import AccelDDPStrategy
from strategies.conftest import Said

pytestmark = pytest.mark.numbers

STATIC, SEARCHED = "DistributedDataParallel static", "DistributedDataParallel searched"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("scenario", "wrappers"),
    [
        ("every_parameter_is_used", ["Supervised", STATIC, STATIC]),
        ("every_parameter_is_used_and_gradients_accumulate", ["Supervised", "Supervised", STATIC, STATIC]),
        ("a_parameter_is_unused", ["Wayward", SEARCHED, SEARCHED]),
        ("a_parameter_is_unused_on_rank_1", ["Wayward", SEARCHED, SEARCHED]),
        ("a_parameter_is_unused_in_the_second_step", ["Wayward", STATIC, SEARCHED, SEARCHED]),
        ("a_parameter_is_unused_now_and_then_and_it_was_said", [SEARCHED] * 3),
        ("a_static_graph_was_said", [STATIC] * 3),
        ("optimization_becomes_manual", ["Turning", STATIC, SEARCHED, SEARCHED]),
    ],
)
def test_the_first_step_shows_how_to_wrap(said: Said, scenario: str, wrappers: list[str]) -> None:
    assert [rank["wrappers"] for rank in said(scenario)] == [wrappers, wrappers]


@pytest.mark.medium
@pytest.mark.parametrize(
    "scenario",
    [
        "a_parameter_is_unused_in_the_second_step",
        "every_parameter_is_used",
        "a_parameter_is_unused_on_rank_1",
        "a_parameter_is_unused_now_and_then_and_it_was_said",
    ],
)
def test_ranks_hold_the_same_weights(said: Said, scenario: str) -> None:
    first, second = said(scenario)
    assert torch.equal(first["weights"], second["weights"])


@pytest.mark.medium
def test_observing_changes_no_number(said: Said) -> None:
    observed, given = said("every_parameter_is_used")[0], said("a_static_graph_was_said")[0]
    torch.testing.assert_close(observed["weights"], given["weights"], rtol=1e-6, atol=1e-7)


@pytest.mark.medium
def test_hooks_after_the_first_backward_pass_see_the_average(said: Said) -> None:
    for rank in said("gradients_are_changed_after_the_backward_pass"):
        torch.testing.assert_close(rank["accel_ddp"], rank["ddp"], rtol=1e-6, atol=1e-7)


@pytest.mark.medium
def test_gradients_are_compressed(said: Said) -> None:
    compressed, plain = said("gradients_travel_in_float16")[0]["weights"], said("every_parameter_is_used")[0]["weights"]
    torch.testing.assert_close(compressed, plain, rtol=1e-2, atol=1e-3)
    assert not torch.equal(compressed, plain)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("scenario", "complaint"),
    [
        (
            "a_parameter_is_unused_in_the_third_step",
            "got no gradient in this one: spare.weight, spare.bias",
        ),
        ("a_sparse_gradient_is_there_on_rank_0", "shape (4, 3) has a sparse gradient on 1 of 2 ranks"),
        pytest.param(
            "gradients_travel_in_bfloat16",
            "gradient_compression='bf16' cannot be done here: BF16",
            marks=pytest.mark.skipif(torch.version.cuda is not None, reason="a build for CUDA sends bfloat16"),
        ),
        ("more_processes_than_samples", "A loader's dataset (TensorDataset) has 1 samples for 2 processes"),
    ],
)
def test_what_cannot_be_is_said_on_every_rank(said: Said, scenario: str, complaint: str) -> None:
    for rank in said(scenario):
        assert complaint in rank["error"]


def test_a_misspelt_compression_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="gradient_compression='fp8'; did you mean 'fp16'"):
        AccelDDPStrategy(gradient_compression="fp8")  # type: ignore[arg-type]


def test_a_misspelt_setting_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="AccelDDPStrategy has no setting 'gradient_compresion'; did you mean"):
        AccelDDPStrategy(gradient_compresion="fp16")


def test_two_hooks_are_refused() -> None:
    with pytest.raises(ValueError, match="DDP takes one hook"):
        AccelDDPStrategy(gradient_compression="fp16", ddp_comm_hook=lambda state, bucket: None)
