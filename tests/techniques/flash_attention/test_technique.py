"""Flash attention as a technique: what it tries, keeps, leaves alone and says; what may stand around it."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn import functional as F

from attention_zoo import FOUND, LEFT_ALONE, Attention
from lightning_accel import AccelError, AccelPlugin, AccelWarning, FlashMultiheadAttention, Host, Plan, accelerate
from lightning_accel.engine import Engine
from lightning_accel.plan import FlashAttentionSetting
from lightning_accel.techniques.flash_attention import hand_written
from lightning_accel.techniques.flash_attention.backends import BACKENDS, installed_backends
from lightning_accel.techniques.flash_attention.call import sdpa
from lightning_accel.techniques.flash_attention.technique import FlashAttention
from lightning_accel.trial import Comparison, Trial

ALONE: dict[str, Any] = {"precision": "32-true", "memory_format": "preserve", "inplace_activations": False}


@pytest.fixture(autouse=True)
def _forget_captures() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Stack(nn.Module):
    """Layers of one kind with a residual around each: (B, T, 32) → (B, T, 32)."""

    def __init__(self, kind: type[nn.Module], depth: int = 2, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind(**options) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            out = layer(x)
            x = x + (out[0] if isinstance(out, tuple) else out)
        return x


class Layer(nn.Module):
    """A block with an MLP, so that there is more around attention than attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = FOUND["causal_buffer"]()
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attention(x))


def start(model: nn.Module, setting: Any = "sdpa", **settings: Any) -> Engine:
    return accelerate(model, Plan(**{**ALONE, "flash_attention": setting, **settings}))


def step(model: nn.Module, handle: Engine | None, x: Tensor) -> list[Tensor]:
    """The loss and the gradients of one training step."""
    model.zero_grad()
    if handle is None:
        loss = model(x).square().mean()
    else:
        with handle.step():
            loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def batch(size: int = 4, length: int = 16) -> Tensor:
    return torch.randn(size, length, 32)


def choices(handle: Engine, site: str = "layers.0") -> dict[str, str]:
    technique = handle.technique(FlashAttention)
    assert technique is not None
    return technique._dispatches[site].choices


def clock(monkeypatch: pytest.MonkeyPatch, speed: float) -> list[Trial]:
    """Lets every trial find the candidate ``speed`` times as fast, whatever this machine is doing."""
    timed: list[Trial] = []

    def time(self: Trial, original: Any, candidate: Any) -> Comparison:
        timed.append(self)
        return Comparison(original_ms=10.0, candidate_ms=10.0 / speed)

    monkeypatch.setattr(Trial, "time", time)
    return timed


# -- found, tried, kept --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["einsum_positions_first", "padding_between_reshapes", "shifted_windows"])
def test_a_named_backend_is_used_wherever_the_numbers_agree(name: str) -> None:
    model = Stack(FOUND[name], depth=1)
    plain, handle, x = copy.deepcopy(model), start(model), batch()
    for _ in range(2):
        torch.testing.assert_close(step(model, handle, x), step(plain, None, x), rtol=1e-4, atol=1e-5)
    assert handle.report.applied("flash_attention") == ["layers.0"]
    handle.undo()
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", ["weights_returned", "soft_capped"])
def test_what_is_left_alone_is_reported_with_its_reason(name: str) -> None:
    kind, reason = LEFT_ALONE[name]
    model, x = Stack(kind, depth=1), batch()
    plain, handle = copy.deepcopy(model), start(model, {"force": ["layers"]})
    for _ in range(2):
        assert torch.equal(step(model, handle, x)[0], step(plain, None, x)[0])
    assert re.sub("0x[0-9a-f]+", "0x", handle.report.refused("flash_attention")["layers.0"]) == reason
    handle.undo()


def test_the_step_of_the_trial_is_the_originals_to_the_last_bit() -> None:
    model, x = Stack(FOUND["at_sign"]), batch()
    plain, handle = copy.deepcopy(model), start(model)
    assert all(map(torch.equal, step(model, handle, x), step(plain, None, x)))
    handle.undo()


def test_auto_keeps_what_the_clock_says_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, speed=1.5)
    model = Stack(FOUND["at_sign"])
    handle = start(model, "auto")
    step(model, handle, batch())
    assert set(choices(handle).values()) == {"sdpa"} or not choices(handle)
    step(model, handle, batch())
    assert set(choices(handle).values()) == {"sdpa"}
    assert "1.50x the speed here (10.00 → 6.67 ms a pass)" in handle.report.of("flash_attention").changes["layers.0"]
    handle.undo()


def test_auto_leaves_alone_what_is_slower_and_says_by_how_much(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, speed=0.8)
    model = Stack(FOUND["at_sign"])
    handle = start(model, "auto")
    for _ in range(2):
        step(model, handle, batch())
    assert handle.report.applied("flash_attention") == []
    assert "not faster by sdpa: 0.80x the speed here" in handle.report.refused("flash_attention")["layers.1"]
    handle.undo()


def test_sites_of_one_kind_share_a_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = clock(monkeypatch, speed=2.0)
    model = Stack(FOUND["at_sign"], depth=4)
    handle = start(model, "auto")
    step(model, handle, batch())
    assert len(timed) == 1
    assert len(handle.report.applied("flash_attention")) == 4
    handle.undo()


def test_other_numbers_are_refused_whatever_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(BACKENDS["sdpa"]), "__call__", lambda self, call: 1.01 * sdpa(call))
    model = Stack(FOUND["at_sign"])
    handle = start(model)
    with pytest.warns(AccelWarning, match="not in force anywhere: left alone: other numbers than the original"):
        step(model, handle, batch())
    assert set(handle.report.refused("flash_attention")) == {"layers.0", "layers.1"}
    handle.undo()


def test_a_new_length_is_decided_again_once_for_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(FOUND["causal_buffer"], depth=2)
    plain = copy.deepcopy(model)
    timed = clock(monkeypatch, speed=0.5)
    handle = start(model, "auto")
    step(model, handle, batch(length=8))
    timed.clear()
    clock(monkeypatch, speed=2.0)
    for length in (40, 48, 60, 40):  # one class: up to 64
        x = batch(length=length)
        torch.testing.assert_close(step(model, handle, x), step(plain, None, x), rtol=1e-4, atol=1e-5)
    assert sorted(choices(handle).values()) == ["original", "sdpa"]
    assert handle.report.applied("flash_attention") == ["layers.0", "layers.1"]
    handle.undo()


def test_a_deterministic_run_never_asks_the_clock(monkeypatch: pytest.MonkeyPatch, determinism_restored: None) -> None:
    timed = clock(monkeypatch, speed=0.1)
    torch.use_deterministic_algorithms(True)
    model = Stack(FOUND["at_sign"])
    handle = start(model, "auto")
    for length in (8, 16, 32):
        step(model, handle, batch(length=length))
    assert not timed
    assert len(handle.report.applied("flash_attention")) == 2
    handle.undo()


def test_dropout_that_is_no_module_does_not_stand_in_the_way_of_a_trial() -> None:
    class Functional(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x)
            return self.merge(F.dropout((q @ k.mT).softmax(-1), 0.5, self.training) @ v)

    model = Stack(Functional)
    handle = start(model)
    step(model, handle, batch())
    assert len(handle.report.applied("flash_attention")) == 2
    handle.undo()


def test_a_module_that_keeps_its_weights_in_evaluation_only_is_fused_in_training() -> None:
    class Keeps(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x)
            weights = (q @ k.mT).softmax(-1)
            if not self.training:
                self.weights = weights
            return self.merge(weights @ v)

    model = Stack(Keeps, depth=1)
    handle, x = start(model), batch()
    for _ in range(2):
        step(model, handle, x)
        model.eval()
        with torch.no_grad(), handle.step("validate"):
            model(x)
        assert model.layers[0].weights.shape == (4, 4, 16, 16)
        model.train()
        del model.layers[0].weights
    assert handle.report.applied("flash_attention") == ["layers.0"]
    handle.undo()


def test_without_verification_it_is_fused_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = clock(monkeypatch, speed=0.1)
    model = Stack(FOUND["at_sign"])
    plain, handle, x = copy.deepcopy(model), start(model, "auto", verify=False), batch()
    for _ in range(2):
        torch.testing.assert_close(step(model, handle, x), step(plain, None, x), rtol=1e-4, atol=1e-5)
    assert not timed
    assert set(choices(handle).values()) == {"sdpa"}
    handle.undo()


# -- names, errors -------------------------------------------------------------------------------------------------


def test_the_plan_names_every_backend() -> None:
    assert set(get_args(FlashAttentionSetting)) == {"auto", "off", *BACKENDS}


def test_off_does_nothing() -> None:
    model = Stack(FOUND["at_sign"])
    handle = start(model, "off")
    step(model, handle, batch())
    assert handle.report.of("flash_attention").status == "off"
    handle.undo()


def test_sites_can_be_skipped_by_path_and_by_class() -> None:
    model = nn.Sequential(Stack(FOUND["at_sign"]), Stack(FOUND["no_heads"]))
    handle = start(model, {"backend": "sdpa", "skip": ["0.layers.1", "no_heads"]})
    step(model, handle, batch())
    assert handle.report.applied("flash_attention") == ["0.layers.0"]
    assert set(handle.report.refused("flash_attention")) == {"0.layers.1", "1.layers.0", "1.layers.1"}
    handle.undo()


def test_a_forced_site_is_fused_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, speed=0.5)
    model = Stack(FOUND["at_sign"])
    handle = start(model, {"force": ["layers.1"]})
    step(model, handle, batch())
    assert handle.report.applied("flash_attention") == ["layers.1"]
    handle.undo()


def test_a_name_that_matches_nothing_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"flash_attention\.skip: Stack has no module or class 'layer\.0'; did you mean"
    ):
        start(Stack(FOUND["at_sign"]), {"skip": ["layer.0"]})


@pytest.mark.parametrize(
    ("backend", "mend"),
    [("flash-attn", "runs on NVIDIA"), ("fa3", "use 'sdpa'"), ("flex", "use 'sdpa'"), ("cudnn", "no cudnn attention")],
)
def test_a_backend_that_is_not_here_is_a_warning_that_names_those_that_are(backend: str, mend: str) -> None:
    with pytest.warns(
        AccelWarning, match=rf"flash_attention: backend '{backend}': .*{mend}.*Here there are: sdpa, flash"
    ):
        start(Stack(FOUND["at_sign"]), backend).undo()
    with pytest.raises(AccelError):
        start(Stack(FOUND["at_sign"]), backend, strict=True)


OLD = Host(kind="cuda", device_name="Tesla T4", capability=(7, 5))
NEW = Host(kind="cuda", device_name="H200", capability=(9, 0), native_bf16=True, compiler="triton")


def test_a_gpu_that_is_too_old_is_told_so() -> None:
    reason = BACKENDS["flash"].unavailable(OLD)
    assert reason == "Tesla T4 is too old for it: compute capability 7.5, 8.0 is needed; use 'sdpa'"


@pytest.mark.parametrize(
    ("backend", "mend"),
    [
        ("flash-attn", "pip install 'lightning-accel[flash]'"),
        ("fa3", "github.com/Dao-AILab/flash-attention"),
        ("fa4", "pip install flash-attn-4"),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_way_to_get_it(backend: str, mend: str) -> None:
    assert mend in (BACKENDS[backend].unavailable(NEW) or "")
    assert BACKENDS[backend].unavailable(dataclasses.replace(NEW, kernels=frozenset({backend}))) is None


AMD = Host(kind="rocm", device_name="MI300X", arch="gfx942", native_bf16=True, compiler="triton")


@pytest.mark.parametrize(
    ("arch", "found"),
    [
        ("gfx942", ["sdpa", "flash", "efficient", "flex"]),
        ("gfx1100", ["sdpa", "flash", "efficient", "flex"]),
        ("gfx1151", ["sdpa", "flash", "efficient", "flex"]),  # experimental: torch says so of each call
        ("gfx1030", ["sdpa", "flex"]),
        ("", ["sdpa", "flash", "efficient", "flex"]),  # not known: torch is asked when it is tried
    ],
)
def test_on_amd_cards_there_are_the_kernels_that_torch_has_for_the_architecture(arch: str, found: list[str]) -> None:
    host = dataclasses.replace(AMD, arch=arch)
    assert [backend.name for backend in installed_backends(host)] == found


@pytest.mark.parametrize(
    ("backend", "reason"),
    [("cudnn", "MI300X is AMD's"), ("fa3", "MI300X is AMD's"), ("fa4", "is AMD's"), ("flash-attn", "for ROCm")],
)
def test_on_amd_cards_the_others_say_why_not(backend: str, reason: str) -> None:
    assert reason in (BACKENDS[backend].unavailable(AMD) or "")


def test_asked_for_and_nothing_there_is_a_warning() -> None:
    with pytest.warns(AccelWarning, match="flash_attention was asked for and found no site"):
        start(nn.Sequential(nn.Linear(2, 2))).undo()


def test_a_call_that_the_named_backend_lacks_something_for_is_said_once() -> None:
    class Wide(Attention):
        """Values wider than queries, which the CPU's flash kernel does not take."""

        def forward(self, x: Tensor) -> Tensor:
            return x + (self.q(x)[..., :8] @ self.k(x)[..., :8].mT).softmax(-1) @ self.v(x)

    model, x = Stack(Wide, depth=1), batch()
    handle = start(model, "flash")
    with pytest.warns(AccelWarning, match="values as wide as the queries: torch's own choice computes it"):
        step(model, handle, x)
    for _ in range(2):
        step(model, handle, x)
    handle.undo()


def test_an_error_of_the_users_own_code_comes_through_as_it_is() -> None:
    class Fussy(Attention):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[1] == 5:
                raise KeyError("five is too many")
            q, k, v = self.qkv(x)
            return self.merge((q @ k.mT).softmax(-1) @ v)

    model = Stack(Fussy)
    handle = start(model)
    for _ in range(2):
        step(model, handle, batch())
    with pytest.raises(KeyError, match="five is too many"):
        step(model, handle, batch(length=5))
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"), handle.step():
        model(torch.randn(2, 4, 31))
    handle.undo()


def test_a_gradient_penalty_is_noticed_before_anything_is_fused() -> None:
    model = Stack(FOUND["at_sign"], depth=1)
    plain, handle = copy.deepcopy(model), start(model, {"force": ["layers"]})

    def penalty(model: nn.Module, handle: Engine | None) -> Tensor:
        x = torch.linspace(-1, 1, 2 * 8 * 32).view(2, 8, 32).requires_grad_()
        if handle is None:
            loss = model(x).sum()
        else:
            with handle.step():
                loss = model(x).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        gradient.square().sum().backward()
        return gradient.detach()

    for _ in range(3):
        torch.testing.assert_close(penalty(model, handle), penalty(plain, None))
    assert "differentiated again" in handle.report.refused("flash_attention")["layers.0"]
    handle.undo()


@pytest.mark.filterwarnings("ignore:flash_attention was asked for and is not in force")
def test_a_forward_that_is_another_at_every_call_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counts(Attention):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            q, k, v = self.qkv(x)
            return self.merge((q @ k.mT).softmax(-1) @ v) + 0 * self.calls

    model, x = Stack(Counts, depth=1), batch()
    handle = start(model)
    monkeypatch.setattr(hand_written, "_MAX_GRAPHS", 6)
    for _ in range(8):
        step(model, handle, x)
    assert "another one at every call" in handle.report.refused("flash_attention")["layers.0"]
    handle.undo()


def test_what_fails_in_mid_run_falls_back_to_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Stack(FOUND["at_sign"], depth=2), batch()
    plain, handle = copy.deepcopy(model), start(model)
    step(model, handle, x)

    def fail(self: Any, call: Any) -> Tensor:
        raise RuntimeError("kernel gone")

    monkeypatch.setattr(type(BACKENDS["sdpa"]), "__call__", fail)
    with pytest.warns(AccelWarning, match="failed in mid-run: RuntimeError: kernel gone"):
        assert torch.equal(step(model, handle, x)[0], step(plain, None, x)[0])
    handle.undo()


def test_a_softmax_at_the_end_of_a_model_does_not_take_its_attention_along() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.words = Stack(FOUND["at_sign"]), nn.Parameter(torch.randn(10, 32))

        def forward(self, x: Tensor) -> Tensor:
            return (self.body(x) @ self.words.t()).softmax(-1)

    model = Classifier()
    handle = start(model)
    step(model, handle, batch())
    assert handle.report.applied("flash_attention") == ["body.layers.0", "body.layers.1"]
    handle.undo()


# -- nn.MultiheadAttention -----------------------------------------------------------------------------------------


class Discards(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.attention(x, x, x)
        return out


class Reads(Discards):
    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.attention(x, x, x)
        return out * weights.mean()


def test_weights_that_nobody_reads_are_no_longer_computed() -> None:
    model = Stack(Discards, dropout=0.1)
    handle = start(model)
    step(model, handle, batch())
    assert handle.report.applied("flash_attention") == ["layers.0.attention", "layers.1.attention"]
    handle.undo()


def test_weights_that_somebody_reads_are() -> None:
    model, x = Stack(Reads), batch()
    plain, handle = copy.deepcopy(model), start(model, {"force": ["layers"]})
    for _ in range(2):
        assert torch.equal(step(model, handle, x)[0], step(plain, None, x)[0])
    assert "may be read" in handle.report.refused("flash_attention")["layers.0.attention"]
    handle.undo()


def test_the_layers_of_torch_are_taken_too() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    plain, handle, x = copy.deepcopy(model), start(model), batch()
    for _ in range(2):
        torch.testing.assert_close(step(model, handle, x), step(plain, None, x), rtol=1e-4, atol=1e-5)
    assert len(handle.report.applied("flash_attention")) == 2
    handle.undo()


def test_the_module_of_our_own_is_left_as_it_is() -> None:
    model = nn.ModuleList([FlashMultiheadAttention(32, 4)])
    handle = start(model, {"force": ["0"]})
    assert handle.report.refused("flash_attention") == {"0": "already fused"}
    handle.undo()


# -- what stands around it -----------------------------------------------------------------------------------------


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


def test_a_checkpointed_block_runs_fused_when_it_is_recomputed_too() -> None:
    model = Stack(Layer, depth=3)
    handle, x = start(model, gradient_checkpointing="full"), batch()
    for _ in range(2):
        step(model, handle, x)
    with torch.profiler.profile() as profile:
        step(model, handle, x)
    count = sum(e.count for e in profile.key_averages() if e.key == "aten::_scaled_dot_product_flash_attention_for_cpu")
    assert count == 6
    handle.undo()


def test_a_model_compiled_over_it_computes_the_same() -> None:
    model = Stack(Layer)
    plain, handle, x = copy.deepcopy(model), start(model), batch()
    for _ in range(2):
        step(model, handle, x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-5)
    handle.undo()


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
    with torch.profiler.profile() as profile:
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

    from lightning_models import Supervised, tokens
    from models import TinyTransformer

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
    plugin = AccelPlugin(**ALONE, flash_attention="sdpa", log=False)
    module, _ = fit(plugin)
    plain, _ = fit(None)
    assert module.losses == pytest.approx(plain.losses, rel=1e-4)
    assert len(plugin.report.applied("flash_attention")) == 3


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_resumed_run_decides_as_before_without_a_trial(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, speed=2.0)
    _, trainer = fit(AccelPlugin(**ALONE, log=False), steps=3)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    timed = clock(monkeypatch, speed=0.1)
    resumed = AccelPlugin(**ALONE, log=False)
    module, _ = fit(resumed, ckpt_path=tmp_path / "half.ckpt")
    assert not timed
    assert len(resumed.report.applied("flash_attention")) == 3
    plain, _ = fit(None, ckpt_path=tmp_path / "half.ckpt")
    assert module.losses == pytest.approx(plain.losses, rel=1e-4)
