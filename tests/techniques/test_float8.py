"""Linear layers in 8-bit floating point: which, and how far off.

What a card would compute is simulated: torchao computes it in float32 (``emulate``), on any machine.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_accel.engine import Engine
from lightning_accel.techniques.float8 import Float8Patch, bounds, configuration, float8_patches
from support.techniques.float8_cases import H100, RECIPES, in_float8, network, simulated, step

pytest.importorskip("torchao", reason="8-bit floating point is torchao's")
pytestmark = pytest.mark.numbers


@pytest.fixture
def no_clock(determinism_restored: None) -> None:
    """A deterministic run decides nothing by time: emulated, nothing is ever faster."""
    torch.use_deterministic_algorithms(True)


# -- which layers ----------------------------------------------------------------------------------------------------


def test_layers_are_changed_after_the_first_step_and_the_report_has_their_errors(no_clock: None) -> None:
    model = network()
    engine = simulated(model)
    assert in_float8(model) == []
    step(engine)
    assert in_float8(model) == ["0", "2"]
    for remark in engine.report.of("float8").changes.values():
        assert "output off by" in remark
        assert "gradients by" in remark
    engine.undo()
    assert in_float8(model) == []


def test_layers_that_are_not_faster_are_left_alone_with_the_times() -> None:
    """Here none is: a machine that emulates the format computes more than it would without."""
    model = network()
    engine = simulated(model)
    step(engine)
    assert in_float8(model) == []
    assert all("x the speed here" in why for why in engine.report.refused("float8").values())
    engine.undo()


def test_layers_of_one_size_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_accel.techniques import float8

    timed = []
    speed = float8.Float8._speed
    monkeypatch.setattr(
        float8.Float8, "_speed", lambda self, patch, *rest: (timed.append(patch.site), speed(self, patch, *rest))[1]
    )
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)], nn.Linear(32, 16))
    engine = simulated(model)
    step(engine)
    assert timed == ["0", "1", "4"]  # the first one's input needs no gradient
    assert len(engine.report.refused("float8")) == 5
    engine.undo()


class Scaled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def _with_own_forward() -> nn.Linear:
    layer = nn.Linear(32, 32)
    layer.forward = lambda input: input  # type: ignore[method-assign]
    return layer


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (nn.Linear(32, 10), "32 x 10 are not both multiples of 16"),
        (nn.Linear(30, 32), "30 x 32 are not both multiples of 16"),
        (Scaled(32, 32), "a Scaled with a forward of its own"),
        (_with_own_forward(), "a Linear with a forward of its own"),
        (parametrizations.weight_norm(nn.Linear(32, 32)), "parametrization"),
        (nn.LazyLinear(32), "lazy"),
        (nn.Linear(32, 32, dtype=torch.complex64), "complex64"),
    ],
)
def test_which_layers_are_left_alone(layer: nn.Module, reason: str) -> None:
    [claim] = float8_patches(nn.Sequential(layer), "tensorwise", emulate=True)
    assert not isinstance(claim, Float8Patch)
    assert reason in claim.why_not


def test_a_layer_that_is_not_called_in_training_is_not_tried(no_clock: None) -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].eval()
    model.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign]
    engine = simulated(model)
    step(engine)
    assert engine.report.refused("float8").keys() == {"1", "2"}
    engine.undo()


def test_rows_that_are_no_multiple_of_16_refuse_it(no_clock: None) -> None:
    model = network()
    engine = simulated(model)
    step(engine, torch.randn(17, 32))
    assert all("17 rows" in why for why in engine.report.refused("float8").values())
    engine.undo()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_whose_values_share_a_scale_with_a_giant_is_refused_where_that_costs_them(
    recipe: str, no_clock: None
) -> None:
    """By one scale for a tensor all that is a million times smaller is lost; by a scale a row, where it is alone."""
    inputs = torch.randn(512, 32)
    inputs[0, 0] = 3e7
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    with torch.no_grad():
        model[0].weight[:, 0] = 0.0  # so that the giant counts for nothing in what comes out
    engine = simulated(model, recipe)
    step(engine, inputs)
    refused = engine.report.refused("float8")
    assert ("0" in refused) is (recipe == "tensorwise")
    if refused:
        assert "where its formats round by" in refused["0"]
    engine.undo()


def test_a_layer_of_zeros_is_no_error(no_clock: None) -> None:
    """As output projections begin: their outputs are zeros, and so are their inputs' gradients."""
    model = network()
    nn.init.zeros_(model[2].weight)
    engine = simulated(model)
    step(engine)
    assert in_float8(model) == ["0", "2"]
    engine.undo()


# -- how far off -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_results_are_off_by_what_the_formats_round(recipe: str, no_clock: None) -> None:
    """More than bfloat16 would be, or nothing was computed in 8 bits at all; and less than the bound."""
    plain, model = network(), network()
    engine = simulated(model, recipe)
    step(engine)
    model.zero_grad()
    of_values, of_gradients = bounds(configuration(recipe))
    inputs = torch.randn(32, 32)
    outputs, expected = model[0](inputs), plain[0](inputs)
    error = float((outputs - expected).detach().norm() / expected.detach().norm())
    assert 2**-8 < error < of_values
    outputs.square().sum().backward()
    expected.square().sum().backward()
    theirs = plain[0].weight.grad
    assert float((model[0].weight.grad - theirs).norm() / theirs.norm()) < of_gradients + 2 * of_values
    engine.undo()


def test_the_bounds_are_half_the_distance_of_neighbours() -> None:
    """Of e4m3, with 3 bits of a mantissa, 1/16; of e5m2, 1/8, which tensorwise scaling has for gradients."""
    assert bounds(configuration("tensorwise")) == pytest.approx((2**0.5 / 16, (1 / 256 + 1 / 64) ** 0.5))
    assert bounds(configuration("rowwise")) == pytest.approx((2**0.5 / 16, 2**0.5 / 16))


def test_it_trains_about_as_well(no_clock: None) -> None:
    finals = []
    for engine in (simulated(network()), Engine(network(), H100, [])):
        model, generator = engine.model, torch.Generator().manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        target = torch.randn(32, 16, generator=generator)
        for _ in range(60):
            inputs = torch.randn(64, 32, generator=generator)
            with engine.step():
                loss = (model(inputs) - inputs @ target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        finals.append(loss.item())
        engine.undo()
    assert finals[0] == pytest.approx(finals[1], rel=0.1)
    assert finals[0] != finals[1]
