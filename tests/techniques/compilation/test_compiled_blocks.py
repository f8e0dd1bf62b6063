"""Repeated blocks are compiled in place, once tried; what they compute, and what is left of them afterwards."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.core import compiled
from lightning_accel.core.host import Host
from lightning_accel.core.report import AccelWarning
from lightning_accel.core.torch_private.compilation import set_compiled_call
from lightning_accel.core.torch_private.modules import eager_call
from lightning_accel.techniques import compiled_blocks
from lightning_accel.techniques.compilation import CompileSetting
from support.models import TASKS, TinyCNN, TinyTransformer
from support.techniques.compilation_runs import Backend, compiling, run

# The compiler's own, which it hides from all but those who make warnings errors.
# tests/test_engine.py holds that a technique refused everywhere is said as a warning, too.
pytestmark = [
    pytest.mark.numbers,
    pytest.mark.filterwarnings("ignore:compile was asked for and is not in force"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

MODES: list[CompileSetting] = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


class Small(nn.Module):
    """As little as is worth compiling: one kernel forward, one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.scale * x))


@pytest.mark.medium
def test_a_compiled_run_has_the_plain_runs_losses_dropout_included() -> None:
    host = Host.detect("cpu")
    if host.compiler is None:
        pytest.skip("no C++ compiler here")
    plain = nn.Sequential(nn.Linear(8, 8), Small(), Small())
    model = copy.deepcopy(plain)
    handle = compiling(model, host=host)
    losses: list[list[float]] = [[], []]
    for net, used, found in ((plain, None, losses[0]), (model, handle, losses[1])):
        torch.manual_seed(1)
        for _ in range(3):
            with used.step() if used else nullcontext():
                loss = net(torch.ones(4, 8)).square().mean()
            loss.backward()
            found.append(loss.item())
    assert handle.report.applied("compile") == ["1", "2"], handle.report.to_text()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert copy.deepcopy(model)[1]._compiled_call_impl is None
    handle.undo()
    assert model[1]._compiled_call_impl is None


def test_the_first_step_is_eager_and_the_second_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend(monkeypatch)
    model = TinyTransformer()
    handle = compiling(model)
    run(model, handle, steps=1)
    assert (backend.compiled, handle.report.applied("compile")) == (0, [])
    run(model, handle, steps=1)
    assert backend.compiled > 0
    assert handle.report.applied("compile") == ["layers.0", "layers.1", "layers.2"]
    handle.undo()


def test_undone_blocks_run_eagerly_and_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend(monkeypatch)
    model = TinyTransformer()
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    handle = compiling(model)
    run(model, handle)
    handle.undo()
    ran = backend.ran
    run(model, None)
    assert backend.ran == ran
    assert {name: {**dict(vars(m)), "_compiled_call_impl": None} for name, m in model.named_modules()} == {
        name: {**attributes, "_compiled_call_impl": None} for name, attributes in before.items()
    }


def test_after_two_runs_the_limit_of_recompilations_is_the_users_whichever_ends_first() -> None:
    with torch._dynamo.config.patch(recompile_limit=9):
        first, second = compiling(TinyTransformer()), compiling(TinyTransformer())
        first.undo()
        assert torch._dynamo.config.recompile_limit > 9
        second.undo()
        assert torch._dynamo.config.recompile_limit == 9


def test_a_run_may_be_undone_on_another_thread() -> None:
    """Where torch has other settings, since 2.13."""
    with torch._dynamo.config.patch(recompile_limit=9), ThreadPoolExecutor(1) as pool:
        handle = compiling(TinyTransformer())
        pool.submit(handle.undo).result()
    assert not any("could not close" in note for note in handle.report.notes)


def test_with_checkpointing_and_the_rest_it_still_trains_as_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    Backend(monkeypatch)
    plain = TinyTransformer(dropout=0.0)  # without TorchInductor a compiled recomputation draws other random numbers
    model = copy.deepcopy(plain)
    handle = compiling(model, gradient_checkpointing="full")
    assert run(model, handle) == pytest.approx(run(plain, None), rel=1e-5)
    assert handle.report.refused("compile") == {}
    assert len(handle.report.applied("compile")) == len(handle.report.applied("gradient_checkpointing")) == 3
    handle.undo()
    assert not any("forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_is_torchs(monkeypatch: pytest.MonkeyPatch, mode: CompileSetting) -> None:
    seen: list[dict[str, Any]] = []

    def compile_call(module: nn.Module, options: dict[str, Any], *_: Any) -> None:
        seen.append(options)
        set_compiled_call(module, eager_call(module))

    monkeypatch.setattr(compiled_blocks, "compile_call", compile_call)
    model = TinyTransformer()
    handle = compiling(model, mode, trust="unchecked")
    run(model, handle)
    handle.undo()
    expected = torch._inductor.list_mode_options(mode)
    assert len(seen) == 3
    assert all(options == {**expected, "fallback_random": True} for options in seen)


def test_where_no_block_is_repeated_modules_of_several_layers_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend(monkeypatch)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.Flatten()))
    handle = compiling(model)
    for _ in range(3):
        with handle.step():
            loss = model(torch.randn(4, 8)).sum()
        loss.backward()
    assert handle.report.applied("compile") == ["0", "1"]
    assert backend.compiled == 2
    handle.undo()


@pytest.mark.parametrize("technique", [{"gradient_checkpointing": "full"}, {"memory_format": "channels_last"}])
@pytest.mark.parametrize("how", ["in place", "wrapper"])
def test_a_model_that_the_user_compiled_trains_as_before_under_the_other_techniques(
    technique: dict[str, Any], how: str
) -> None:
    task = TASKS["cnn"]
    plain = task.model()
    model: Any = copy.deepcopy(plain)
    if how == "in place":
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    with pytest.warns(AccelWarning, match="compile"):
        handle = compiling(model, "off", **technique)
    losses: list[list[float]] = [[], []]
    for net, used, found in ((plain, None, losses[0]), (model, handle, losses[1])):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            inputs, targets = task.batch(step)
            optimizer.zero_grad()
            with used.step() if used else nullcontext():
                loss = task.loss(net(inputs), targets)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    handle.undo()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    torch.testing.assert_close(
        [b.clone() for b in model.buffers()], [b.clone() for b in plain.buffers()], rtol=1e-5, atol=1e-6
    )


def test_modules_of_torch_nn_are_compiled_too() -> None:
    """``module.compile()`` compiles nothing there: the compiler starts at no frame whose code is torch's."""
    seen: list[Any] = []
    layer = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return graph.forward

    original = torch.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda call, **options: original(call, backend=backend))
        compiled.compile_call(layer, {})
    layer(torch.randn(2, 4))
    assert len(seen) == 1
    compiled.undo_compile(layer)
    layer(torch.randn(3, 4))
    assert len(seen) == 1


def test_watched_steps_run_compiled_parts_eagerly_and_leave_them_compiled() -> None:
    ran: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *args: (ran.append(1), graph.forward(*args))[1]

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[0] = torch.compile(model[0], backend=backend)
    x: Tensor = torch.randn(2, 4)
    with compiled.eager_where_compiled(model):
        model(x)
    assert ran == []
    model(x)
    assert ran == [1]


def test_plain_models_are_not_asked_to_stand_aside() -> None:
    with compiled.eager_where_compiled(TinyCNN()):
        assert torch.compiler.is_compiling() is False
