"""Attention written by hand: every spelling is found, computes what it did, and what only looks like it stays."""

from __future__ import annotations

import math
import re
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accel.techniques.flash_attention.finder import find_sites
from lightning_accel.techniques.flash_attention.hand_written import HandWrittenSite
from support.attention_inductor import PATTERNS
from support.attention_lookalikes import LEFT_ALONE
from support.attention_module import MAX_LEN, Attention
from support.attention_zoo import FOUND
from support.errors import relative_error
from support.techniques.flash_attention.hand_written_runs import ROUNDING, SDPA, assert_same, batch, make, results, run
from support.techniques.flash_attention.recorder import Recorder

pytestmark = pytest.mark.numbers

# -- what is found -------------------------------------------------------------------------------------------------


# One of every kind: the others differ in what the first test has seen to.
KINDS = [
    *(
        "at_sign",
        "baddbmm_with_bias",
        "einsum_heads_last",
        "values_on_the_left",
        "learned_temperature",
        "causal_buffer",
    ),
    *(
        "causal_by_where",
        "padding_between_reshapes",
        "padding_added_and_causal",
        "relative_positions",
        "scores_in_float32",
    ),
]
FEW = ("at_sign", "causal_buffer", "padding_between_reshapes", "relative_positions", "scores_in_float32")


def kinds(*without: str) -> pytest.MarkDecorator:
    """One of every kind, most of them only in `make test-slow`."""
    chosen = [name for name in KINDS if name not in without]
    params = [pytest.param(name, marks=[] if name in FEW else [pytest.mark.slow]) for name in chosen]
    return pytest.mark.parametrize("name", params)


@pytest.mark.parametrize("name", FOUND)
def test_every_spelling_reaches_the_backend_and_computes_what_it_did(name: str) -> None:
    module, recorder = make(FOUND[name]), Recorder()
    site = HandWrittenSite("attention", module)
    assert_same(module, site, batch(2, 16), backend=recorder)
    assert site.nothing_found() is None
    assert {call.query.dim() for call in recorder.calls} <= {4}
    assert recorder.calls  # where samples hide every key it is called for the others


@pytest.mark.slow  # one of every kind is tried at several lengths below
@pytest.mark.parametrize("name", FOUND)
def test_every_spelling_is_right_at_every_length(name: str) -> None:
    module = make(FOUND[name])
    site = HandWrittenSite("attention", module)
    for size, length in ((2, 16), (3, 24)):  # captured as it is, then for any sizes
        assert_same(module, site, batch(size, length))
    assert site.nothing_found() is None


def test_every_spelling_is_seen_in_the_code_of_its_module() -> None:
    for kind in (*FOUND.values(), *PATTERNS.values()):
        assert [found.site for found in find_sites(nn.ModuleDict({"layer": kind()}))] == ["layer"]


@kinds()
def test_odd_lengths_and_a_single_position_are_right(name: str) -> None:
    module = make(FOUND[name])
    site = HandWrittenSite("attention", module)
    for size, length in ((2, 7), (2, 1), (1, 13)):
        assert_same(module, site, batch(size, length))
    assert site.nothing_found() is None


@kinds()
def test_without_gradients_and_in_evaluation_it_is_right_too(name: str) -> None:
    module = make(FOUND[name], dropout=0.5).eval()
    site, x = HandWrittenSite("attention", module), batch(2, 16)
    with torch.no_grad():
        assert relative_error([run(site, x)], [module(x)]) < ROUNDING


@pytest.mark.parametrize("name", ["at_sign", "causal_buffer", "einsum_positions_first", "relative_positions"])
def test_in_float64_the_gradients_pass_gradcheck(name: str) -> None:
    module = make(FOUND[name]).double()
    site = HandWrittenSite("attention", module)
    x = torch.randn(1, 4, 32, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: run(site, x), (x,), fast_mode=True)


@kinds("baddbmm_with_bias")  # torch refuses that
def test_under_autocast_it_is_no_further_off_than_the_original(name: str) -> None:
    module, x = make(FOUND[name]), batch(2, 16)
    truth = [part.detach() for part in results(module, module, x)]
    site = HandWrittenSite("attention", module)
    with torch.autocast("cpu", torch.bfloat16):
        plain, fused = results(module, module, x), results(module, lambda x: run(site, x), x)
    assert [part.dtype for part in fused] == [part.dtype for part in plain]
    assert relative_error(fused, truth) < 4 * relative_error(plain, truth) + 0.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["at_sign", "causal_by_where", "padding_from_the_input", "einsum_heads_first"])
def test_other_dtypes_keep_their_dtype_and_numbers(name: str, dtype: torch.dtype) -> None:
    module, x = make(FOUND[name]).to(dtype), batch(2, 16, dtype)
    with torch.no_grad():
        fused, plain = run(HandWrittenSite("attention", module), x), module(x)
    assert fused.dtype == dtype
    assert relative_error([fused], [plain]) < 20 * torch.finfo(dtype).eps


def test_keys_that_are_transposed_in_place_later_are_read_as_they_were() -> None:
    class InPlace(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x)
            transposed = k.mT
            k.transpose_(0, 1)
            return self.merge((q @ transposed).softmax(-1) @ v)

    module = make(InPlace)
    site = HandWrittenSite("attention", module)
    assert_same(module, site, batch(2, 16))


def test_a_bias_that_is_learned_goes_on_learning() -> None:
    module = make(FOUND["relative_positions"])
    run(HandWrittenSite("attention", module), batch(2, 16)).sum().backward()
    assert module.relative.grad.abs().sum() > 0


def test_a_module_that_owns_two_attentions_has_both_fused() -> None:
    class Twice(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x)
            y = (q @ k.mT).softmax(-1) @ v
            return self.merge((y @ k.mT).softmax(-1) @ v)

    module, recorder = make(Twice), Recorder()
    run(HandWrittenSite("attention", module), batch(2, 16), recorder)
    assert len(recorder.calls) == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
def test_a_graph_break_on_the_way_does_no_harm() -> None:
    class Breaks(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x)
            torch._dynamo.graph_break()
            y = self.merge((q @ k.mT).softmax(-1) @ v)
            torch._dynamo.graph_break()
            return 2 * y

    module, recorder = make(Breaks), Recorder()
    site = HandWrittenSite("attention", module)
    assert_same(module, site, batch(2, 16))
    run(site, batch(2, 16), recorder)
    assert len(recorder.calls) == 1


def test_values_may_have_more_heads_than_the_weights() -> None:
    class Shared(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x)
            return self.merge((q[:, :1] @ k[:, :1].mT).softmax(-1) @ v)

    module = make(Shared)
    assert_same(module, HandWrittenSite("attention", module), batch(2, 16))


def test_an_assignment_to_what_the_caller_holds_reaches_it() -> None:
    class Writes(Attention):
        def forward(self, x: Tensor, state: Tensor) -> Tensor:
            q, k, v = self.qkv(x)
            state *= 2
            state[state > 1] = 1.0
            return self.merge((q @ k.mT).softmax(-1) @ v)

    module, x = make(Writes), batch(2, 16)
    state = torch.rand(4)
    twin = state.clone()
    HandWrittenSite("attention", module).run(SDPA, Writes.forward, (x, state), {})
    module(x, twin)
    assert torch.equal(state, twin)


# -- what is left alone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_only_looks_like_it_stays_bit_for_bit(name: str) -> None:
    kind, reason = LEFT_ALONE[name]
    module, x, recorder = make(kind), batch(2, 16), Recorder()
    site = HandWrittenSite("attention", module)
    fused = run(site, x, recorder)
    plain = module(x)
    for actual, expected in zip(fused, plain, strict=True):
        assert torch.equal(actual, expected)
    assert not recorder.calls
    assert re.sub("0x[0-9a-f]+", "0x", site.nothing_found()) == reason


# -- dropout -------------------------------------------------------------------------------------------------------


class DropsWeights(nn.Module):
    """One head, values that are the unit vectors: the output is the dropped weights themselves."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        values = torch.eye(x.shape[1]).expand(x.shape[0], -1, -1)
        return F.dropout((x @ x.mT).softmax(-1), self.p, self.training) @ values


def test_dropout_drops_at_its_rate_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    module, x = DropsWeights(0.3), 0.1 * torch.randn(64, 32, 8)
    weights = run(HandWrittenSite("attention", module), x)
    drawn = weights.numel()
    assert abs((weights == 0).float().mean() - 0.3) < 4 * math.sqrt(0.3 * 0.7 / drawn)
    plain = module.eval()(x)
    kept = (weights / plain)[weights != 0]
    assert torch.allclose(kept, torch.full_like(kept, 1 / 0.7), rtol=1e-4)


def test_dropout_draws_another_mask_every_time_and_none_in_evaluation() -> None:
    module, x = DropsWeights(0.5), torch.randn(2, 16, 8)
    site = HandWrittenSite("attention", module)
    assert not torch.equal(run(site, x), run(site, x))
    module.eval()
    assert torch.equal(run(site, x), run(site, x))


def test_layers_that_share_their_code_keep_their_own_dropout_rates() -> None:
    shared: dict[Any, Any] = {}
    recorder, x = Recorder(), torch.randn(2, 16, 8)
    for p in (0.1, 0.3, 0.2):
        run(HandWrittenSite("attention", DropsWeights(p), shared), x, recorder)
    assert [call.dropout_p for call in recorder.calls] == pytest.approx([0.1, 0.3, 0.2])


class DrawsByNumpy(nn.Module):
    """Dynamo would draw by torch in NumPy's place: the run would go on with other numbers of both."""

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ x.mT + torch.from_numpy(np.random.rand(16, 16)).float()
        return scores.softmax(-1) @ x


def test_a_module_that_draws_by_numpy_is_not_captured() -> None:
    site, x = HandWrittenSite("attention", DrawsByNumpy()), torch.randn(2, 16, 8)
    with pytest.raises(Exception, match="it draws by NumPy"):
        run(site, x)


def test_a_capture_has_no_weak_references_to_parameters_which_torch_swaps_without_any_only() -> None:
    site = HandWrittenSite("attention", make(FOUND["at_sign"]))
    run(site, batch(2, 16))
    for parameter in site.module.parameters():
        assert weakref.getweakrefcount(parameter) == 0


# -- what runs around it -------------------------------------------------------------------------------------------


class Watches(TorchDispatchMode):
    """Notes every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_under_a_dispatch_mode_the_fused_kernel_runs_and_is_seen() -> None:
    module, x, recorder = make(FOUND["at_sign"]), batch(2, 16), Recorder()
    site = HandWrittenSite("attention", module)
    run(site, x, recorder)
    with Watches() as watcher:
        run(site, x, recorder)
    run(site, x, recorder)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in watcher.seen
    assert len(recorder.calls) == 3


def test_it_runs_the_operations_that_an_expert_would_write() -> None:
    class ByHand(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return self.merge(F.scaled_dot_product_attention(*self.qkv(x)))

    class Transposes(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x)
            return self.merge((q @ k.transpose(-2, -1) / math.sqrt(8)).softmax(-1) @ v)

    module, x = make(ByHand), batch(2, 16)
    site = HandWrittenSite("attention", make(Transposes))
    run(site, x)
    with Watches() as by_hand:
        module(x)
    with Watches() as fused:
        run(site, x)
    assert fused.seen == by_hand.seen


def test_a_hook_that_comes_later_sees_the_weights() -> None:
    module, x, recorder = make(FOUND["scale_inside_the_queries"]), batch(2, 16), Recorder()
    site = HandWrittenSite("attention", module)
    run(site, x, recorder)
    seen: list[Tensor] = []
    handle = module.softmax.register_forward_hook(lambda module, args, output: seen.append(output))
    run(site, x, recorder)
    handle.remove()
    run(site, x, recorder)
    assert [weights.shape for weights in seen] == [(2, 4, 16, 16)]
    assert len(recorder.calls) == 2


def test_a_hook_that_is_there_already_keeps_its_weights() -> None:
    module, x, recorder, seen = make(FOUND["scale_inside_the_queries"]), batch(2, 16), Recorder(), []
    module.softmax.register_forward_hook(lambda module, args, output: seen.append(output))
    site = HandWrittenSite("attention", module)
    run(site, x, recorder)
    assert len(seen) == 1
    assert not recorder.calls


def test_lengths_that_change_are_captured_a_few_times_and_not_for_ever() -> None:
    site = HandWrittenSite("attention", make(FOUND["causal_buffer"]))
    torch._dynamo.utils.counters.clear()
    for length in range(2, MAX_LEN, 5):
        run(site, batch(2, length))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
