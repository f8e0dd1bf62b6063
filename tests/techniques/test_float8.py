"""Linear layers in 8-bit floating point: which, how far off, and that they stay the layers they are.

What a card would compute is simulated: torchao computes it in float32 (``emulate``), on any machine.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_accel import Plan, accelerate
from lightning_accel.core.host import Host
from lightning_accel.core.report import AccelWarning
from lightning_accel.engine import Engine
from lightning_accel.techniques.float8 import Float8, Float8Patch, bounds, configuration, float8_patches

pytest.importorskip("torchao", reason="8-bit floating point is torchao's")
pytestmark = pytest.mark.numbers

H100 = Host(kind="cuda", device_name="NVIDIA H100", capability=(9, 0), native_bf16=True)
A100 = Host(kind="cuda", device_name="NVIDIA A100", capability=(8, 0), native_bf16=True)
CPU = Host(kind="cpu", device_name="a CPU")
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


@pytest.fixture
def no_clock(determinism_restored: None) -> None:
    """A deterministic run decides nothing by time: emulated, nothing is ever faster."""
    torch.use_deterministic_algorithms(True)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))


def simulated(model: nn.Module, recipe: str = "tensorwise", **options: Any) -> Engine:
    """The technique at work, emulated, in an engine of its own."""
    return Engine(model, H100, [Float8(recipe, emulate=True, **options)])


def step(engine: Engine, inputs: Tensor | None = None) -> Tensor:
    inputs = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) if inputs is None else inputs
    with engine.step():
        outputs: Tensor = engine.model(inputs)
    outputs.float().square().mean().backward()
    return outputs.detach()


def in_float8(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


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
    assert reason in claim.reason


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


# -- in which calls --------------------------------------------------------------------------------------------------


def test_a_last_batch_of_another_size_runs_as_it_would_have(no_clock: None) -> None:
    plain, model = network(), network()
    engine = simulated(model)
    step(engine)
    inputs = torch.randn(7, 32)
    assert torch.equal(model(inputs), plain(inputs))
    assert model(torch.randn(0, 32)).shape == (0, 16)
    engine.undo()


def test_an_evaluation_gives_what_the_checkpoint_gives_anywhere(no_clock: None) -> None:
    plain, model = network(), network()
    engine = simulated(model)
    step(engine)
    inputs = torch.randn(32, 32)
    assert torch.equal(model.eval()(inputs), plain(inputs))
    assert not torch.equal(model.train()(inputs), plain(inputs))
    engine.undo()


@pytest.mark.filterwarnings("error")
def test_under_autocast_it_is_in_its_dtype_without_a_warning(no_clock: None) -> None:
    model = network()
    engine = simulated(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step(engine)
        assert in_float8(model) == ["0", "2"]
        outputs = step(engine)
    assert outputs.dtype == torch.bfloat16
    assert model[0].weight.grad.dtype == torch.float32
    engine.undo()


def test_inputs_of_more_dimensions_and_by_name_are_taken(no_clock: None) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    model.forward = lambda x: model[0](input=x)  # type: ignore[method-assign]
    engine = simulated(model)
    step(engine, torch.randn(2, 8, 32))
    assert in_float8(model[0]) == [""]
    assert model(torch.randn(2, 8, 32)).shape == (2, 8, 32)
    engine.undo()


def test_it_is_captured_whole_by_a_compiler(no_clock: None) -> None:
    model = network()
    engine = simulated(model)
    step(engine)
    inputs = torch.randn(32, 32)
    expected = model(inputs)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(inputs), expected)
    compiled(inputs).sum().backward()
    engine.undo()
    torch._dynamo.reset()


# -- hostile uses ----------------------------------------------------------------------------------------------------


def test_tied_weights_stay_tied_and_gather_both_gradients(no_clock: None) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(64, 32)
            self.head = nn.Linear(32, 64, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embedding(tokens))

    model = Tied()
    plain = copy.deepcopy(model)
    engine = simulated(model)
    tokens = torch.arange(32)
    for _ in range(2):
        step(engine, tokens)
        plain(tokens).square().mean().backward()
    assert model.head.weight is model.embedding.weight
    gradient, expected = model.head.weight.grad, plain.head.weight.grad
    assert float((gradient - expected).norm() / expected.norm()) < 0.2
    engine.undo()


def test_hooks_on_a_layer_are_called_once_a_call(no_clock: None) -> None:
    model = network()
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    model[2].register_full_backward_hook(lambda *_: calls.append("backward"))
    engine = simulated(model)
    for _ in range(3):
        step(engine)
    assert calls == ["forward", "backward"] * 3
    engine.undo()


def test_frozen_weights_get_no_gradient(no_clock: None) -> None:
    model = network()
    model[2].weight.requires_grad_(False)
    engine = simulated(model)
    for _ in range(2):
        step(engine)
    assert "2" in in_float8(model)
    assert model[2].weight.grad is None
    assert model[0].weight.grad is not None
    engine.undo()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copied", "pickled"])
def test_a_copy_made_in_mid_run_computes_with_its_own_weights(copied: Any, no_clock: None) -> None:
    model = network()
    engine = simulated(model)
    step(engine)
    twin = copied(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert twin(torch.randn(32, 32)).any()
    engine.undo()


def test_the_state_dict_does_not_notice(no_clock: None) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    parameters = list(model.parameters())
    engine = simulated(model)
    step(engine)
    now = model.state_dict()
    assert list(now) == list(before)
    assert all(torch.equal(now[name], before[name]) for name in before)
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert [type(module) for module in model] == [nn.Linear, nn.GELU, nn.Linear]
    engine.undo()


def test_checkpointed_blocks_recompute_what_they_computed(no_clock: None) -> None:
    from torch.utils.checkpoint import checkpoint

    model = network()
    engine = simulated(model)
    step(engine)
    inputs = torch.randn(32, 32, requires_grad=True)
    gradients = []
    for reentrant in (True, False, None):
        outputs = model(inputs) if reentrant is None else checkpoint(model, inputs, use_reentrant=reentrant)
        [gradient] = torch.autograd.grad(outputs.sum(), inputs) if not reentrant else [_backward(outputs, inputs)]
        gradients.append(gradient)
    assert torch.equal(gradients[0], gradients[2])
    assert torch.equal(gradients[1], gradients[2])
    engine.undo()


def _backward(outputs: Tensor, inputs: Tensor) -> Tensor:
    inputs.grad = None
    outputs.sum().backward()  # reentrant checkpoints know no autograd.grad
    assert inputs.grad is not None
    return inputs.grad


def test_unverified_it_is_in_force_at_once() -> None:
    model = network()
    engine = simulated(model, verify=False)
    assert in_float8(model) == ["0", "2"]
    engine.undo()


# -- machines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("host", "reason"), [(A100, "compute capability 8.9"), (CPU, "a CPU has no 8-bit")])
def test_machines_without_the_format_are_told(host: Host, reason: str) -> None:
    with pytest.warns(AccelWarning, match=reason):
        handle = accelerate(network(), Plan(precision="32-true", float8="tensorwise", tune="off"), host=host)
    handle.undo()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_large_layers_on_a_card_are_tried_and_train(recipe: str, compiled: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("has no 8-bit floating point")
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)) for _ in range(2)]
    model = nn.Sequential(*blocks).cuda()
    plan = Plan(precision="bf16-mixed", float8=recipe, compile=compiled, tune="off")
    handle = accelerate(model, plan)
    inputs = torch.randn(4096, 4096, device="cuda")
    for _ in range(4):
        with handle.step():
            loss = model(handle.batch(inputs)).float().square().mean()
        loss.backward()
        assert loss.isfinite()
    found = handle.report.of("float8").changes | handle.report.refused("float8")
    assert found.keys() == {"0.0", "0.2", "1.0", "1.2"}
    assert all("x the speed here" in remark and "output off by" in remark for remark in found.values())
    handle.undo()
