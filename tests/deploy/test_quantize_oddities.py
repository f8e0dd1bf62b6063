"""Models and data that are not like most: what ``quantize`` makes of them, or says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accel.deploy import QuantizeError, export, quantize
from lightning_accel.deploy.agreement import differs

pytestmark = pytest.mark.numbers


class Twice(nn.Module):
    """One layer under two names, called by both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("mode", ["int8-dynamic", "int8-static", "int8-weight"])
def test_a_model_that_is_one_layer_is_quantised_itself(mode: str) -> None:
    model, x = nn.Linear(256, 256), torch.randn(4, 256)
    found = quantize(model, mode, calibration=[x])
    with torch.no_grad():
        assert 0 < off(found.model(x), model(x)) < 0.05
    assert found.converted == ("",)
    assert found.bytes_after < 0.3 * found.bytes_before
    assert "" not in dict(found.model.named_children())


@pytest.mark.parametrize("model", [nn.Linear(64, 8), Twice()])
def test_a_layer_alone_or_under_two_names_is_written_in_int8(model: nn.Module) -> None:
    x = torch.randn(4, 64)
    exported = export(quantize(model, "int8-dynamic", calibration=[x]), x, "torchscript")
    with torch.no_grad():
        assert 0 < off(exported.load()(x), model(x)) < 0.05


def test_a_layer_under_two_names_is_exchanged_at_both() -> None:
    found = quantize(Twice(), "int8-dynamic", calibration=[torch.randn(4, 64)])
    assert found.converted == ("first",)
    assert found.model.first is found.model.second
    assert not isinstance(found.model.second, nn.Linear)


class ReadsItsWeight(nn.Module):
    """Computes with the weight of one of its layers, and calls the other."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.called = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.called(F.linear(x, 2 * self.read.weight, self.read.bias))


def test_a_layer_whose_weight_something_else_reads_stays_in_float() -> None:
    found = quantize(ReadsItsWeight(), "int8-dynamic", calibration=[torch.randn(4, 64)])
    assert found.converted == ("called",)
    assert "with it in INT8 the model fails, as where something else reads its weight: " in found.kept["read"]


def test_without_data_the_result_says_that_no_call_was_tried() -> None:
    assert "no calibration data, and no call was tried" in str(quantize(ReadsItsWeight(), "int8-dynamic"))


class Classes(nn.Module):
    """Says the class alone: (B, 64) → (B,), in whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).argmax(-1)


class Words(Classes):
    """Returns no tensor."""

    def forward(self, x: Tensor) -> str:
        return f"{len(super().forward(x))} classes"


def test_the_error_of_whole_numbers_is_the_share_that_differs() -> None:
    model, x = Classes(), torch.randn(500, 64)
    found = quantize(model, "int8-dynamic", calibration=[x], max_error=0.5)
    with torch.no_grad():
        assert found.error == (found.model(x) != model(x)).double().mean()
    assert str(found).split("error ")[1].endswith("% of the outputs, in whole numbers")
    assert 0 < found.error < 0.5


@pytest.mark.parametrize(("others", "is_right"), [(1, True), (2, False)])
def test_of_whole_numbers_one_may_be_another_in_a_file(others: int, is_right: bool) -> None:
    model, x = Classes().eval(), torch.eye(64)[:8]
    nn.init.eye_(model.layer.weight)
    made = quantize(model, "int8-dynamic").model

    def written(x: Tensor) -> Tensor:
        return torch.cat([model(x)[:-others], model(x)[-others:] + 1])

    with torch.no_grad():
        assert torch.equal(made(x), model(x))
        failure, _ = differs(model, written, [((x,), {})], made)
    assert (failure == "") is is_right


def test_an_error_that_cannot_be_measured_is_none() -> None:
    found = quantize(Words(), "int8-dynamic", calibration=[torch.randn(4, 64)])
    assert found.error is None
    assert "not measured: on the calibration data the model returns no finite numbers" in str(found)


@pytest.mark.parametrize("mode", ["int8-dynamic", "int8-static"])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.full((4, 64), float("nan")), r"layer '0' takes NaN or infinite numbers on batch 1, which holds such"),
        (torch.full((4, 64), 1e38), r"layer '0' returns NaN .* on batch 1, whose own numbers are finite: the model"),
        (torch.randn(0, 64), r"batch 1 of the calibration data, with tensors of \(0, 64\), has no rows"),
    ],
)
def test_calibration_data_of_which_no_range_can_be_taken_are_an_error(mode: str, x: Tensor, message: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    nn.init.constant_(model[0].weight, 0.5)
    with pytest.raises(ValueError, match=message):
        quantize(model, mode, calibration=[torch.randn(4, 64), x])


@pytest.mark.parametrize("mode", ["int8-dynamic", "int8-static"])
def test_int8_takes_a_model_in_float32(mode: str) -> None:
    x = torch.randn(4, 64).bfloat16()
    with pytest.raises(ValueError, match=r"a model in float32, and layer '0' is in torch\.bfloat16: model\.float\(\)"):
        quantize(nn.Sequential(nn.Linear(64, 8)).bfloat16(), mode, calibration=[x])


class Pixels(nn.Module):
    """Makes float32 of images in whole numbers: (B, 64) → (B, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 8)

    def forward(self, images: Tensor) -> Tensor:
        x = images.float() / 255
        return self.layer(x)


def test_float32_that_the_model_makes_itself_is_named_with_its_line() -> None:
    images = torch.randint(256, (4, 64), dtype=torch.uint8)
    with pytest.raises(QuantizeError, match=r"fails in torch\.float16 at .* In float32 it does not") as caught:
        quantize(Pixels(), "fp16", calibration=[images])
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = lines.index("        x = images.float() / 255") + 1
    assert f"float32 numbers itself, last at {__file__}:{number}, in forward" in str(caught.value)


class Conv1D(nn.Module):
    """Named as one of torch's layers but for a letter's size, as Hugging Face has one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_a_listing_says_plainly_what_was_gained() -> None:
    assert str(quantize(nn.Sequential(nn.Linear(64, 64)), "fp16")).startswith("fp16: 1 layer, ")
    none = str(quantize(nn.Sequential(Conv1D()), "int8-dynamic"))
    assert none.startswith("int8-dynamic: nothing was converted, ")
    assert f"in float: 0: {Conv1D.__module__}.Conv1D has no kernel in int8-dynamic" in none
    assert "larger than before" in str(quantize(nn.Sequential(nn.Linear(2, 2)), "int8-dynamic"))


def test_amounts_have_as_many_digits_as_tell_them_from_zero() -> None:
    with pytest.raises(QuantizeError, match=r"allowed is 1e-07%"):
        quantize(nn.Linear(64, 8), "bf16", calibration=[torch.randn(4, 64)], max_error=1e-9)


def test_what_is_no_module_is_an_error_that_says_how_to_have_one() -> None:
    with pytest.raises(TypeError, match=r"'m\.ckpt' is a path.*load_from_checkpoint\('m\.ckpt'\)"):
        quantize("m.ckpt", "fp16")
    with pytest.raises(TypeError, match=r"is what quantize\(\) has made, fp16: give the one in float, its \.original"):
        quantize(quantize(nn.Linear(2, 2), "fp16"), "int8-dynamic")
    with pytest.raises(ValueError, match=r"max_error='5%': give a share of .* 0\.05 for 5% say"):
        quantize(nn.Linear(2, 2), "fp16", max_error="5%")
