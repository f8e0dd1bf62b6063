"""Claims 1 to 5, 8 and 10, about networks: each measures what it says, and names what the machine lacks for it."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lightning_accel import accelerate
from lightning_accel.claims import (
    row_01_graph_mode,
    row_02_amp_linear,
    row_03_amp_accuracy,
    row_04_flash_attention,
    row_05_inference_export,
    row_08_channels_last,
    row_10_int8,
)
from lightning_accel.claims._digits import digits
from lightning_accel.claims.claim import Missing, NotHereError, Target
from lightning_accel.claims.measure import interleaved_ms, timed_ms
from lightning_accel.claims.record import Row, measured
from lightning_accel.core.host import Host
from lightning_accel.deploy import quantize, quantizing
from support.simulated_hosts import SIMULATED_HOSTS

pytestmark = pytest.mark.numbers

pytest.importorskip("sklearn.datasets")  # here: as it is imported it sets environment variables, as no test may

# TorchScript, and quantisation by torch.ao: what is given up is one side of a comparison.
deprecated = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Threads that share out networks this small do little but wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for row in (row_01_graph_mode, row_02_amp_linear, row_08_channels_last, row_10_int8):
        monkeypatch.setattr(row, "timed_ms", lambda sides, seconds: timed_ms(sides, seconds=0))
    monkeypatch.setattr(row_04_flash_attention, "interleaved_ms", partial(interleaved_ms, rounds=2, warm_up=0))


@pytest.fixture
def _without_sklearn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)


@pytest.fixture(scope="module")
def small_network() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """The network of claim 10, less wide, with the digits it was not trained on: images and labels."""
    training, testing = digits(seed=0)
    model = row_10_int8.trained(*row_10_int8.tensors_of(training), width=256, epochs=20)
    return model, *row_10_int8.tensors_of(testing)


def conditions(row: Row) -> list[str]:
    return [found.condition for found in (*row.figures, *row.missing)]


# -- the digits --------------------------------------------------------------------------------------------------------


def test_digits_are_split_by_the_seed_and_none_is_on_both_sides() -> None:
    training, testing = digits(seed=1)
    again, _ = digits(seed=1)
    other, _ = digits(seed=2)
    assert sorted([*training.indices, *testing.indices]) == list(range(1797))
    assert training.indices == again.indices != other.indices


def test_a_digit_is_a_float32_image_within_0_and_1() -> None:
    image, label = digits(seed=0)[0][0]
    assert (image.shape, image.dtype, label.dtype) == ((1, 8, 8), torch.float32, torch.int64)
    assert 0 <= float(image.min()) < float(image.max()) <= 1


@pytest.mark.usefixtures("_without_sklearn")
@pytest.mark.parametrize("row", [row_03_amp_accuracy, row_10_int8])
def test_without_scikit_learn_a_row_names_what_to_install(row: Any) -> None:
    found = measured(row.CLAIM, row.measure)
    assert found.verdict == "not measured here"
    assert "pip install scikit-learn" in found.why


# -- 1: graph mode -----------------------------------------------------------------------------------------------------


def test_a_block_is_the_claimed_product_transposed_and_activated() -> None:
    block = row_01_graph_mode.Block()
    x = torch.randn(128, 256)
    out = block(x)
    assert out.shape == (512, 128)
    torch.testing.assert_close(out, (x @ block.product.weight.T).T.clamp(min=0))


def test_without_a_compiler_torchscript_is_measured_and_torch_compile_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Host, "detect", lambda device=None: Host(kind="cpu", device_name="bare"))
    found = measured(row_01_graph_mode.CLAIM, row_01_graph_mode.measure)
    assert [figure.condition for figure in found.figures] == ["by TorchScript, in inference"]
    assert [gap.condition for gap in found.missing] == ["by torch.compile"]


# -- 2: AMP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "precision"), [("A100", "bf16-mixed"), ("T4", "16-mixed"), ("AVX2 CPU", "bf16-mixed")]
)
def test_amp_is_what_auto_takes_or_else_bfloat16(host: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "detect", lambda device=None: SIMULATED_HOSTS[host])
    assert row_02_amp_linear.amp_precision() == precision


@pytest.mark.parametrize("make", [row_02_amp_linear.forward, row_02_amp_linear.training_step])
def test_a_layer_that_is_not_computed_in_half_precision_is_not_measured(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("bf16-mixed", 8, 8)()
    monkeypatch.setattr(
        row_02_amp_linear, "accelerate", lambda model, plan: accelerate(model, plan.replace(precision="32-true"))
    )
    with pytest.raises(AssertionError):
        make("bf16-mixed", 8, 8)()


# -- 3: the accuracy of AMP --------------------------------------------------------------------------------------------


def test_a_drop_is_the_median_over_seeds_of_what_each_of_them_lost() -> None:
    figure = row_03_amp_accuracy.accuracy_drop("half", [0.90, 0.95, 0.99], [0.88, 0.94, 0.99])
    assert figure.value == pytest.approx(0.01)
    assert (figure.low, figure.high) == pytest.approx((0.0, 0.02))
    assert figure.note == "94.67% to 93.67%, means of 3 seeds"


def test_a_drop_of_more_than_a_point_over_all_seeds_does_not_meet_the_claim() -> None:
    plain = [0.95, 0.96, 0.97]
    assert not row_03_amp_accuracy.accuracy_drop("half", plain, [a - 0.011 for a in plain]).is_met
    assert row_03_amp_accuracy.accuracy_drop("half", plain, [a + 0.011 for a in plain]).is_met


@pytest.mark.medium
def test_a_seed_trains_the_same_network_again_and_it_learns() -> None:
    first, second = (row_03_amp_accuracy.trained_accuracy("bf16-mixed", seed=0, epochs=2) for _ in range(2))
    assert first == second > 0.5


def test_lightning_speaks_again_after_a_training_that_broke_off() -> None:
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        with contextlib.suppress(KeyError), row_03_amp_accuracy.quiet_lightning():
            assert not logger.isEnabledFor(logging.INFO)
            raise KeyError
        assert logger.isEnabledFor(logging.INFO)
    finally:
        logger.setLevel(before)


# -- 4: FlashAttention -------------------------------------------------------------------------------------------------


def test_an_error_is_relative_to_the_norm_of_what_is_exact() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert row_04_flash_attention.relative_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)


def test_only_a_fused_kernel_is_taken_for_one() -> None:
    q = torch.randn(1, 1, 16, 8)
    by_hand = row_04_flash_attention.Attention()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert row_04_flash_attention.is_fused(lambda: scaled_dot_product_attention(q, q, q))
    with sdpa_kernel(SDPBackend.MATH):
        assert not row_04_flash_attention.is_fused(lambda: scaled_dot_product_attention(q, q, q))
    assert not row_04_flash_attention.is_fused(lambda: by_hand(q, q, q))


def test_attention_by_hand_holds_its_scores_in_memory() -> None:
    model = row_04_flash_attention.Attention()
    handle = accelerate(model, row_04_flash_attention.plan("off", "32-true"))
    assert row_04_flash_attention.peak_bytes(model, 512, handle) >= 2 * 512 * 512 * 4


@pytest.mark.medium
def test_fused_attention_is_as_exact_and_lean_as_claimed_at_small_sizes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"B": 2, "L": 64, "D": 16, "LENGTHS": (1024, 2048, 4096), "MOST_BY_HAND": 2048}.items():
        monkeypatch.setattr(row_04_flash_attention, name, value)
    found = measured(row_04_flash_attention.CLAIM, row_04_flash_attention.measure)
    assert not found.has_failed, found.why
    assert len(set(conditions(found))) == len(conditions(found)) == 7
    claimed = {figure.unit: figure for figure in found.figures if figure.low == figure.high and figure.target}
    assert claimed["error"].target == Target("at most", 1e-4)
    assert claimed["error"].is_met
    assert claimed["x"].target == Target("at most", 4)  # as many times the length
    assert claimed["x"].is_met
    torch._dynamo.reset()


# -- 5: deployment -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deploy", "hidden", "mend"),
    [
        (partial(row_05_inference_export.by_export, "openvino"), "openvino", "pip install openvino"),
        (row_05_inference_export.by_tensorrt, "torch_tensorrt", "NVIDIA GPU"),
    ],
)
def test_a_form_that_is_not_here_says_what_it_takes(
    deploy: Any, hidden: str, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, hidden, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NotHereError, match=mend):
        deploy(nn.Linear(2, 2), torch.ones(1, 2))


def test_a_form_that_computes_something_else_is_not_measured() -> None:
    with pytest.raises(AssertionError, match="not close"):
        row_05_inference_export.deployed(
            lambda model, x: torch.zeros_like, nn.Linear(2, 2), torch.ones(1, 2), torch.float32
        )


@deprecated
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deployed_model_computes_in_the_precision_asked_for_and_leaves_the_original_alone(dtype: torch.dtype) -> None:
    model, x = nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval(), torch.randn(2, 8)
    by_torchscript = partial(row_05_inference_export.by_export, "torchscript")
    run = row_05_inference_export.deployed(by_torchscript, model, x, dtype)
    assert run(x.to(dtype)).dtype == dtype
    assert model[0].weight.dtype == torch.float32


# -- 8: channels_last --------------------------------------------------------------------------------------------------


def test_a_layout_that_is_not_in_force_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, step = row_08_channels_last.training_step("channels_last", "32-true")
    step()
    handle.undo()
    monkeypatch.setattr(
        row_08_channels_last,
        "accelerate",
        lambda model, plan: accelerate(model, plan.replace(memory_format="off")),
    )
    with pytest.raises(AssertionError):
        row_08_channels_last.training_step("channels_last", "32-true")


# -- 10: INT8 ----------------------------------------------------------------------------------------------------------


def test_the_network_of_claim_10_is_of_100_megabytes() -> None:
    width = row_10_int8.WIDTH
    weights = 64 * width + 2 * width**2 + 10 * width
    assert 4 * weights == pytest.approx(100e6, rel=0.01)


@pytest.mark.medium
@deprecated
def test_quantised_networks_know_the_digits_as_well(small_network: Any) -> None:
    model, images, labels = small_network
    exact = row_10_int8.accuracy(model, images, labels)
    assert exact > 0.9
    for mode in row_10_int8.MODES.values():
        form = quantize(model, mode, calibration=images.split(64)).model
        assert row_10_int8.accuracy(form, images, labels) == pytest.approx(exact, abs=0.01)


@deprecated
def test_int8_takes_a_quarter_of_the_space_on_disk() -> None:
    wide = nn.Sequential(nn.Linear(1024, 512))
    share = row_10_int8.saved_bytes(quantize(wide, "int8-dynamic").model) / row_10_int8.saved_bytes(wide)
    assert share == pytest.approx(0.25, abs=0.03)


@pytest.mark.medium
def test_size_in_memory_is_what_a_process_grows_by() -> None:
    layer = nn.Linear(4096, 2048)
    held = row_10_int8.size_in_memory(layer)
    assert held == pytest.approx(math.prod(layer.weight.shape) * 4, rel=0.1)


def test_where_pytorch_does_not_quantise_fp16_is_measured_and_int8_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_10_int8, "trained", partial(row_10_int8.trained, width=16, epochs=1))
    monkeypatch.setattr(row_10_int8, "size_in_memory", row_10_int8.saved_bytes)  # a process a network takes seconds

    def nothing(*given: Any) -> Any:
        raise RuntimeError("Didn't find engine for operation quantized::linear_prepack")

    for mode in ("int8-dynamic", "int8-static"):
        monkeypatch.setitem(quantizing._CONVERT, mode, nothing)
    found = measured(row_10_int8.CLAIM, row_10_int8.measure)
    assert not found.has_failed, found.why
    assert [gap.condition for gap in found.missing] == ["dynamic INT8", "static INT8"]
    assert isinstance(found.missing[0], Missing)
    assert len(set(conditions(found))) == len(conditions(found))
    assert not any("INT8" in figure.condition for figure in found.figures)
