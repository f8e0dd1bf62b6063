"""Repeated blocks are compiled in place, once tried; what does not compile, or is not faster, stays eager."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

from lightning_accel.assembly import AcceleratedModel, accelerate
from lightning_accel.core import compiled
from lightning_accel.core.host import Host
from lightning_accel.core.report import AccelError, AccelWarning
from lightning_accel.core.torch_private.compilation import set_compiled_call
from lightning_accel.core.torch_private.modules import eager_call
from lightning_accel.settings import Plan
from lightning_accel.techniques import compiled_blocks
from lightning_accel.techniques.compilation import CompileSetting
from lightning_accel.techniques.loss import technique as loss
from support.models import TASKS, TinyCNN, TinyTransformer, TransformerBlock

# The compiler's own, which it hides from all but those who make warnings errors.
# tests/test_engine.py holds that a technique refused everywhere is said as a warning, too.
pytestmark = [
    pytest.mark.numbers,
    pytest.mark.filterwarnings("ignore:compile was asked for and is not in force"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

CPU = Host(kind="cpu", device_name="a CPU", compiler="g++")
MODES: list[CompileSetting] = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


def compiling(model: nn.Module, setting: CompileSetting | bool = "on", **more: Any) -> AcceleratedModel:
    host = more.pop("host", CPU)
    settings = {"precision": "32-true", "memory_format": "off", "inplace_activations": False, **more}
    settings.setdefault("flash_attention", "off")  # whose trial goes by the clock
    return accelerate(model, Plan().replace(compile=setting, **settings), host=host)


def run(model: nn.Module, handle: AcceleratedModel | None, steps: int = 3) -> list[float]:
    task = TASKS["transformer"]
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        inputs, targets = task.batch(step)
        optimizer.zero_grad()
        with handle.step() if handle else nullcontext():
            loss = task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Nothing compiled by another test, no pool of threads, and not the variable that TorchInductor leaves behind."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()
    os.environ.pop("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", None)


class Backend:
    """In place of TorchInductor: runs graphs as they are, does ``around`` first, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, around: Callable[[], Any] = lambda: None) -> None:
        self.compiled = 0
        self.ran = 0

        def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
            self.compiled += 1

            def call(*args: Any) -> Any:
                self.ran += 1
                around()
                return graph.forward(*args)

            return call

        def compile_call(module: nn.Module, options: dict[str, Any], *_: Any) -> None:
            module._compiled_call_impl = torch.compile(
                lambda *args, **kwargs: module._call_impl(*args, **kwargs), backend=backend
            )

        monkeypatch.setattr(compiled_blocks, "compile_call", compile_call)


# -- for real ------------------------------------------------------------------------------------------------------


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


# -- with another backend ------------------------------------------------------------------------------------------


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


def raising() -> None:
    raise RuntimeError("no such kernel on this machine")


def test_blocks_that_fail_to_run_compiled_stay_eager_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    Backend(monkeypatch, around=raising)
    plain = TASKS["transformer"].model()
    model = copy.deepcopy(plain)
    handle = compiling(model)
    assert run(model, handle) == run(plain, None)
    refused = handle.report.refused("compile")
    assert set(refused) == {"layers.0", "layers.1"}
    assert all("failed in its trial" in why and "no such kernel" in why for why in refused.values())
    handle.undo()


def test_blocks_that_fail_to_compile_stay_eager_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such instruction")

    def compile_call(module: nn.Module, options: dict[str, Any], *_: Any) -> None:
        module._compiled_call_impl = torch.compile(lambda *args: module._call_impl(*args), backend=broken)

    monkeypatch.setattr(compiled_blocks, "compile_call", compile_call)
    plain = TASKS["transformer"].model()
    model = copy.deepcopy(plain)
    handle = compiling(model)
    assert run(model, handle) == run(plain, None)
    assert all("failed in its trial: BackendCompilerFailed" in r for r in handle.report.refused("compile").values())
    assert len(handle.report.refused("compile")) == 2
    handle.undo()


def test_blocks_that_compute_something_else_compiled_stay_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_call(module: nn.Module, options: dict[str, Any], *_: Any) -> None:
        module._compiled_call_impl = lambda x: 1.1 * module._call_impl(x)

    monkeypatch.setattr(compiled_blocks, "compile_call", compile_call)
    plain = TASKS["transformer"].model()
    model = copy.deepcopy(plain)
    handle = compiling(model)
    assert run(model, handle) == run(plain, None)
    assert all("other numbers" in why for why in handle.report.refused("compile").values())
    handle.undo()


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


# -- refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        (Host(kind="cpu", device_name="a CPU"), r"install a C\+\+ compiler \(Debian, Ubuntu: apt-get install g\+\+\)"),
        (Host(kind="cuda", device_name="a card"), "install Triton and a C compiler"),
        (Host(kind="mps", device_name="M1", compiler="clang"), r"early prototype.*module\.compile\(\)"),
        (Host(kind="xla", device_name="TPU"), "XLA compiles every step itself"),
    ],
)
def test_a_machine_that_cannot_compile_is_told_how_to_and_goes_on(host: Host, reason: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), *(TransformerBlock(8) for _ in range(2)))
    with pytest.warns(AccelWarning, match=f"compile: .*{reason}"):
        handle = compiling(model, host=host)
    assert re.search(reason, handle.report.of("compile").status)
    assert any("compile: " in note for note in handle.report.notes)
    handle.undo()
    with pytest.raises(AccelError, match="strict=True"):
        compiling(model, host=host, strict=True)


def test_a_model_without_blocks_is_a_warning_and_with_strict_an_error() -> None:
    with pytest.warns(AccelWarning, match="Linear has no module of several layers"):
        compiling(nn.Linear(2, 2)).undo()
    with pytest.raises(AccelError):
        compiling(nn.Linear(2, 2), strict=True)


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


@pytest.mark.parametrize(
    ("compile_", "in_pieces", "refused"),
    [
        ("on", "on", {"compile": ["1"], "loss": []}),
        ("on", "auto", {"compile": [], "loss": ["1.2"]}),
        ("auto", "auto", {"compile": ["1"], "loss": []}),
    ],
    ids=["both by name", "compile by name", "neither by name"],
)
def test_a_loss_in_pieces_and_the_compiler_do_not_share_a_module(
    compile_: CompileSetting, in_pieces: str, refused: dict[str, list[str]]
) -> None:
    head = nn.Linear(8, loss.FEWEST_CLASSES)
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), head))
    handle = compiling(model, compile_, loss=in_pieces)
    assert {name: [*handle.report.refused(name)] for name in refused} == refused
    handle.undo()


def test_a_module_that_trains_itself_is_no_block() -> None:
    class Trains(nn.Sequential):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs)

        def training_step(self) -> None: ...

    handle = compiling(Trains(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), "auto")
    assert "whole training steps are not compiled" in handle.report.refused("compile")[""]
    handle.undo()


def test_auto_finds_nothing_without_a_warning() -> None:
    handle = compiling(nn.Linear(2, 2), "auto")
    assert "no module of several layers" in handle.report.refused("compile")[""]
    handle.undo()


def test_a_deterministic_run_does_not_decide_by_the_clock(determinism_restored: None) -> None:
    torch.use_deterministic_algorithms(True)
    with pytest.warns(AccelWarning, match="set compile='on' to compile"):
        compiling(TinyTransformer(), "auto").undo()


@pytest.mark.parametrize("how", ["in place", "wrapper"])
def test_blocks_that_the_user_compiled_stay_theirs(how: str) -> None:
    model = TinyTransformer()
    for index, layer in enumerate(model.layers):
        if how == "in place":
            layer.compile(backend="eager")
        else:
            model.layers[index] = torch.compile(layer, backend="eager")
    mine = [layer._compiled_call_impl for layer in model.layers]
    with pytest.warns(AccelWarning, match="already compiled"):
        handle = compiling(model)
    run(model, handle)
    handle.undo()
    assert [layer._compiled_call_impl for layer in model.layers] == mine


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


def test_a_block_that_is_not_called_on_the_trial_step_stays_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    Backend(monkeypatch)
    model = nn.ModuleList(TransformerBlock(8) for _ in range(2))
    handle = compiling(model)
    for _ in range(2):
        with handle.step():
            model[0](torch.randn(2, 3, 8)).sum().backward()
    assert handle.report.applied("compile") == ["0"]
    assert "not called" in handle.report.refused("compile")["1"]
    handle.undo()


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
