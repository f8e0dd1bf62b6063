"""Linear layers in 8-bit floating point: in which calls, and that they stay the layers they are.

What a card would compute is simulated: torchao computes it in float32 (``emulate``), on any machine.
"""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel import Plan, accelerate
from lightning_accel.core.host import Host
from lightning_accel.core.report import AccelWarning
from support.techniques.float8_cases import A100, CPU, RECIPES, in_float8, network, simulated, step

pytest.importorskip("torchao", reason="8-bit floating point is torchao's")
pytestmark = pytest.mark.numbers


@pytest.fixture
def no_clock(determinism_restored: None) -> None:
    """A deterministic run decides nothing by time: emulated, nothing is ever faster."""
    torch.use_deterministic_algorithms(True)


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
        handle = accelerate(
            network(), Plan(precision="32-true", lossy={"float8": "tensorwise"}, trust="checked"), host=host
        )
    handle.undo()


@pytest.mark.gpu
@pytest.mark.needs_kernels("8-bit products, which are tried for their speed")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("compiled", ["off", "on"])
def test_large_layers_on_a_card_are_tried_and_train(recipe: str, compiled: str) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("has no 8-bit floating point")
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)) for _ in range(2)]
    model = nn.Sequential(*blocks).cuda()
    plan = Plan(precision="bf16-mixed", compile=compiled, lossy={"float8": recipe}, trust="checked")
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
