"""What may stand around fused attention: checkpointing, compilation, copies, and Lightning's Trainer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from lightning_accel import AccelPlugin
from lightning_accel.settings import Plan
from support.techniques.flash_attention.technique_runs import ALONE, Discards, Layer, Stack, batch, clock, start, step

pytestmark = pytest.mark.numbers


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("kind", [Layer, Discards])
def test_checkpointing_goes_on_top(mode: str, kind: type[nn.Module]) -> None:
    model = Stack(kind, depth=3)
    plain, handle, x = copy.deepcopy(model), start(model, gradient_checkpointing=mode), batch()
    for _ in range(3):
        torch.testing.assert_close(step(model, handle, x), step(plain, None, x), rtol=1e-4, atol=1e-5)
    assert len(handle.report.applied("flash_attention")) == 3
    assert len(handle.report.applied("gradient_checkpointing")) == 3
    handle.undo()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Layer, Discards])
def test_on_a_gpu_selective_checkpointing_goes_on_top(kind: type[nn.Module]) -> None:
    """Its blocks are computed again on a thread of autograd's, in trials as well."""
    model = Stack(kind, depth=3).cuda()
    plain, handle, x = copy.deepcopy(model), start(model, gradient_checkpointing="selective"), batch().cuda()
    for _ in range(3):
        torch.testing.assert_close(step(model, handle, x), step(plain, None, x), rtol=1e-4, atol=1e-5)
    assert len(handle.report.applied("flash_attention")) == 3, handle.report
    assert len(handle.report.applied("gradient_checkpointing")) == 3, handle.report
    handle.undo()


@pytest.mark.medium
def test_a_checkpointed_block_runs_fused_when_it_is_recomputed_too() -> None:
    model = Stack(Layer, depth=3)
    handle, x = start(model, gradient_checkpointing="full"), batch()
    for _ in range(2):
        step(model, handle, x)
    with torch.profiler.profile(acc_events=True) as profile:
        step(model, handle, x)
    count = sum(e.count for e in profile.key_averages() if e.key == "aten::_scaled_dot_product_flash_attention_for_cpu")
    assert count == 6
    handle.undo()


@pytest.mark.medium
def test_a_model_compiled_over_it_computes_the_same() -> None:
    model = Stack(Layer)
    plain, handle, x = copy.deepcopy(model), start(model), batch()
    for _ in range(2):
        step(model, handle, x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-5)
    handle.undo()


def test_a_model_compiled_from_outside_is_left_to_the_compiler_and_the_report_says_so() -> None:
    model = Stack(Layer)
    handle = start(model)
    step(torch.compile(model, backend="eager"), handle, batch())
    assert "only by a compiler, to which the original is left" in str(handle.report)
    handle.undo()


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # by torch's own code generator
def test_blocks_that_the_plan_compiles_are_fused_in_their_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.backends.debugging import aot_eager

    # The graphs that the compiler gets, run as they are: building kernels takes a minute.
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph, inputs, **_: aot_eager(graph, inputs))
    model, x = Stack(Layer), batch()
    plain, handle = copy.deepcopy(model), start(model, compile="on")
    for _ in range(3):
        torch.testing.assert_close(step(model, handle, x), step(plain, None, x), rtol=1e-4, atol=1e-5)
    assert "layers.0.attention" in handle.report.applied("compile"), str(handle.report)
    with torch.profiler.profile(acc_events=True) as profile:
        step(model, handle, x)
    names = {event.key for event in profile.key_averages()}
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in names
    assert "aten::_softmax" not in names
    handle.undo()


def test_a_site_inside_a_compiled_module_is_left_to_the_compiler() -> None:
    model = Stack(Layer)
    model.layers[0].compile(backend="aot_eager")
    handle = start(model)
    assert "compiled" in handle.report.refused("flash_attention")["layers.0.attention"]
    handle.undo()


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    model, x = Stack(Layer), batch()
    handle = start(model)
    for _ in range(2):
        step(model, handle, x)
    twin = copy.deepcopy(model)
    expected = model(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    torch.testing.assert_close(twin(x), expected, rtol=1e-4, atol=1e-5)
    handle.undo()


# -- under Lightning -----------------------------------------------------------------------------------------------


def fit(plugin: AccelPlugin | None, steps: int = 6, **options: Any) -> tuple[Any, Trainer]:
    from lightning.pytorch import seed_everything

    from support.lightning_models import Supervised, tokens
    from support.models import TinyTransformer

    seed_everything(0, verbose=False)
    module = Supervised(TinyTransformer(dropout=0.0))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    resumed = options.pop("ckpt_path", None)
    torch._dynamo.reset()
    trainer = Trainer(
        accelerator="cpu", max_steps=steps, logger=False, plugins=[plugin] if plugin else None, **{**quiet, **options}
    )
    trainer.fit(module, tokens(8), ckpt_path=resumed)
    return module, trainer


def test_a_run_trains_as_it_did() -> None:
    plugin = AccelPlugin.from_plan(Plan().replace(**ALONE, flash_attention="sdpa", report=False))
    module, _ = fit(plugin)
    plain, _ = fit(None)
    assert module.losses == pytest.approx(plain.losses, rel=1e-4)
    assert len(plugin.report.applied("flash_attention")) == 3


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_resumed_run_decides_as_before_without_a_trial(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, speed=2.0)
    _, trainer = fit(AccelPlugin.from_plan(Plan().replace(**ALONE, report=False)), steps=3)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    timed = clock(monkeypatch, speed=0.1)
    resumed = AccelPlugin.from_plan(Plan().replace(**ALONE, report=False))
    module, _ = fit(resumed, ckpt_path=tmp_path / "half.ckpt")
    assert not timed
    assert len(resumed.report.applied("flash_attention")) == 3
    plain, _ = fit(None, ckpt_path=tmp_path / "half.ckpt")
    assert module.losses == pytest.approx(plain.losses, rel=1e-4)
