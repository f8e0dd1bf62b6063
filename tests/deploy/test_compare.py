"""Forms beside each other: what is measured, what is left out and why, and which one is recommended."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanSquaredError
from torchmetrics.classification import MulticlassAccuracy

from lightning_accel.deploy import Comparison, compare_forms
from lightning_accel.deploy.accuracy import Judged
from lightning_accel.deploy.comparing import _off, _recommended
from lightning_accel.experiment.pair_test import RatioInterval
from support.models import TinyCNN

pytestmark = pytest.mark.numbers


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4)).eval()


def batches(of: nn.Module, count: int = 4) -> list[tuple[Tensor, Tensor]]:
    """Inputs, and the classes that the model itself finds for them."""
    inputs = [torch.randn(16, 32) for _ in range(count)]
    with torch.no_grad():
        return [(x, of(x).argmax(-1)) for x in inputs]


@pytest.fixture(scope="module")
def found() -> Comparison:
    torch.manual_seed(0)
    served = model()
    forms = ["bf16", "int8-dynamic", "torchscript+int8-dynamic", "tensorrt"]
    return compare_forms(
        served, forms, batches(served), MulticlassAccuracy(4, average="micro"), batch_sizes=(1, 4), seconds=0.05
    )


@pytest.mark.medium
def test_every_form_is_measured_beside_the_original(found: Comparison) -> None:
    assert list(found.forms) == ["eager", "bf16", "int8-dynamic", "torchscript+int8-dynamic"]
    for form in found.forms.values():
        assert 0 < form.latency.p50 <= form.latency.p95 <= form.latency.p99
        assert form.latency.calls >= 10
        assert list(form.samples_per_sec) == [1, 4]
        assert form.first_call_ms > 0
        assert form.disk_bytes > 0
    assert found.forms["eager"].speedup == RatioInterval(1.0, 1.0, 1.0)


@pytest.mark.medium
def test_accuracy_has_an_interval_and_its_drop_one_over_the_same_samples(found: Comparison) -> None:
    eager, int8 = (found.forms[name].scores["MulticlassAccuracy"] for name in ("eager", "int8-dynamic"))
    assert (eager.value, eager.drop, eager.drop_low, eager.drop_high) == (1.0, 0.0, 0.0, 0.0)
    assert int8.low <= int8.value <= int8.high
    assert int8.drop_low <= int8.drop <= int8.drop_high


@pytest.mark.medium
def test_numerical_errors_are_those_of_the_numbers_that_a_form_computes_in(found: Comparison) -> None:
    errors = {name: form.error for name, form in found.forms.items()}
    assert errors["eager"] == 0
    assert 1e-5 < errors["bf16"] < 0.02
    assert errors["int8-dynamic"] == pytest.approx(errors["torchscript+int8-dynamic"], rel=0.1)


@pytest.mark.medium
def test_what_is_not_installed_is_left_out_with_the_mend(found: Comparison) -> None:
    if "tensorrt" in found.forms:
        pytest.skip("torch_tensorrt is here")
    assert "form='tensorrt' needs" in found.left_out["tensorrt"]


def test_what_loses_too_much_is_left_out_with_the_layer_where_that_begins() -> None:
    served = nn.Sequential(model(), nn.Linear(4, 4), nn.LayerNorm(4))
    with torch.no_grad():
        served[1].weight.mul_(1e7)
    compared = compare_forms(served, ["fp16"], [torch.randn(4, 32)], seconds=0.01, batch_sizes=(1,))
    assert "It begins in '1', Linear" in compared.left_out["fp16"]


@pytest.mark.medium
def test_json_holds_it_all(found: Comparison) -> None:
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["recommended"] == found.recommended
    assert told["forms"]["int8-dynamic"]["scores"]["MulticlassAccuracy"]["value"] > 0.5


@pytest.mark.medium
def test_it_is_printed_as_a_table(found: Comparison) -> None:
    first, eager, *others = str(found).splitlines()
    assert first.split()[:6] == ["form", "p50", "ms", "p95", "p99", "speed"]
    assert first.endswith("error")
    assert eager.startswith("eager ")
    assert eager.index(" KiB") > first.index("on disk")
    assert "form                      MulticlassAccuracy" in others
    assert others[-1] == f"Take {found.recommended}: {found.why}"


def test_a_form_that_drops_a_metric_is_worse_and_not_recommended() -> None:
    """Targets are the outputs themselves: whatever computes otherwise has an error, and less is better."""
    served = model()
    with torch.no_grad():
        data = [(x, served(x)) for x, _ in batches(served)]
    found = compare_forms(served, ["int8-dynamic"], data, {"mse": MeanSquaredError()}, max_drop=1e-9, seconds=0.02)
    assert found.worse == {"int8-dynamic": ["mse"]}
    assert found.recommended == "eager"
    assert "1 dropped a metric by more than 1e-09" in found.why


@pytest.mark.medium
def test_the_fastest_is_recommended_and_the_smaller_of_two_that_are_as_fast(found: Comparison) -> None:
    from dataclasses import replace

    base = found.forms["eager"]
    quick = replace(base, speedup=RatioInterval(2.0, 1.8, 2.2), latency=replace(base.latency, p50=1.00), disk_bytes=400)
    small = replace(base, speedup=RatioInterval(2.0, 1.7, 2.2), latency=replace(base.latency, p50=1.02), disk_bytes=100)
    unproven = replace(base, speedup=RatioInterval(3.0, 0.9, 9.0), latency=replace(base.latency, p50=0.5))
    chosen, why = _recommended({"eager": base, "quick": quick, "small": small, "unproven": unproven}, 0.01)
    assert chosen == "small"
    assert "of quick, small, which are as fast, the smallest" in why


def test_a_form_that_is_off_on_any_batch_is_left_out() -> None:
    """Its own check has seen the first one, and what was traced may have taken an `if` on values for granted."""
    first, second = torch.randn(4, 8), torch.randn(4, 8)
    original, other = (Judged({}, [[first], [scale * second]]) for scale in (1.0, 1.1))
    assert _off("torchscript", original, original) == ""
    assert "by 0.1 of the outputs' norm, allowed is 0.01" in _off("torchscript", other, original)
    assert "infinite, or no numbers" in _off("int8-dynamic", Judged({}, [[first], [second * math.nan]]), original)


def test_of_whole_numbers_a_form_may_have_one_otherwise() -> None:
    """Of two classes that are level, rounding decides."""
    original, one, two = (Judged({}, [[torch.tensor(classes)]]) for classes in ([1, 2, 3], [1, 2, 0], [1, 0, 0]))
    assert _off("onnx", one, original) == ""
    assert "by 0.67 of the outputs, in whole numbers" in _off("onnx", two, original)


def test_a_form_that_cannot_hold_the_model_is_left_out_with_the_reason() -> None:
    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else 2 * x

    served = nn.Sequential(model(), Gate())
    found = compare_forms(served, ["pt2"], [torch.randn(4, 32)], seconds=0.01, batch_sizes=(1,))
    assert "its control flow depends on data" in found.left_out["pt2"]
    assert found.recommended == "eager"


@pytest.mark.medium
def test_a_form_that_takes_no_batch_of_one_is_left_out_with_the_reason() -> None:
    class Rows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([2 * row for row in x])  # tracing writes it for so many rows

    served = nn.Sequential(model(), Rows())
    found = compare_forms(served, ["torchscript"], [torch.randn(4, 32)], seconds=0.01, batch_sizes=(1,))
    assert found.left_out == {"torchscript": "it does not take a batch of 1"}


def test_a_model_that_takes_no_batch_of_one_is_measured_at_the_batch_size_of_the_loader() -> None:
    class Four(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(4, 32)

    found = compare_forms(nn.Sequential(Four(), model()), [], [torch.randn(4, 32)], seconds=0.01)
    assert list(found.forms["eager"].samples_per_sec) == [4]
    assert str(found).endswith("no other form is proven to be faster at batch 4 and as exact")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forms": ["onyx"]}, "forms: 'onyx'; did you mean 'onnx'"),
        ({"forms": ["onnx+int9"]}, "forms: 'onnx.int9'"),
        ({"loader": []}, "loader gave no batches"),
        ({"loader": [torch.randn(2, 3, 8, 8)], "metrics": MulticlassAccuracy(4)}, "needs targets"),
        ({"metrics": MulticlassAccuracy(9)}, "cannot take what the model returns"),
        ({"metrics": MulticlassAccuracy(4, average=None)}, "give one of a single number, with average='macro' say"),
        ({"loader": [torch.randn(2, 5)]}, r"cannot be called with the loader's first batch, \(2, 5\): .*forward\(x"),
        ({"max_drop": -1}, "max_drop=-1. Allowed: 0 and more"),
        ({"batch_sizes": (8, 0)}, r"batch_sizes=\(8, 0\). Allowed: numbers above 0"),
    ],
)
def test_what_does_not_fit_is_an_error_that_says_what_to_give(options: dict, message: str) -> None:
    given = {"forms": [], "loader": [(torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))], **options}
    with pytest.raises(ValueError, match=message):
        compare_forms(TinyCNN(), seconds=0.01, **given)


def test_forms_are_a_list_and_metrics_are_made() -> None:
    with pytest.raises(TypeError, match=r"forms='onnx': give a list, \['onnx'\]"):
        compare_forms(TinyCNN(), "onnx", [])
    with pytest.raises(TypeError, match=r"Give a metric of torchmetrics, MulticlassAccuracy\(10\) say"):
        compare_forms(TinyCNN(), [], [torch.randn(2, 3, 8, 8)], MulticlassAccuracy)  # type: ignore[arg-type]
