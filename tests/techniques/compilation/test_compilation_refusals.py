"""What does not compile, computes something else, or is compiled by the user stays eager, and says why."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.core.host import Host
from lightning_accel.core.report import AccelError, AccelWarning
from lightning_accel.techniques import compiled_blocks
from lightning_accel.techniques.compilation import CompileSetting
from lightning_accel.techniques.loss import technique as loss
from support.models import TASKS, TinyTransformer, TransformerBlock
from support.techniques.compilation_runs import Backend, compiling, run

# The compiler's own, which it hides from all but those who make warnings errors.
# tests/test_engine.py holds that a technique refused everywhere is said as a warning, too.
pytestmark = [
    pytest.mark.numbers,
    pytest.mark.filterwarnings("ignore:compile was asked for and is not in force"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]


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
