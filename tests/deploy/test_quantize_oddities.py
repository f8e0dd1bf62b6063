"""Models and data that are not like most: what ``quantize`` makes of them, or says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.deploy import export, quantize

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
