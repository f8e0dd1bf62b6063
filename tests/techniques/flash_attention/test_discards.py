"""Weights are computed unless the caller's own bytecode says that nobody reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_accel.techniques.flash_attention.backends import BACKENDS, Sdpa
from lightning_accel.techniques.flash_attention.call import AttentionCall
from lightning_accel.techniques.flash_attention.discards import caller_discards_weights, discards_second_item
from lightning_accel.techniques.flash_attention.multihead import FlashMultiheadAttention
from lightning_accel.techniques.flash_attention.sites import MultiheadSite

Caller = Callable[[Any, Tensor], Any]
global_output: Any = None


class Recorder(Sdpa):
    """Counts the calls that were fused."""

    count = 0

    def __call__(self, call: AttentionCall) -> Tensor:
        self.count += 1
        return super().__call__(call)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setitem(BACKENDS, "sdpa", recorder)
    return recorder


@pytest.fixture
def attn() -> FlashMultiheadAttention:
    return FlashMultiheadAttention(8, 2)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 2, 8)


def unpacked(attn: Any, x: Tensor) -> Any:
    out, _ = attn(x, x, x)
    return out


def unpacked_into_one_name(attn: Any, x: Tensor) -> Any:
    _, _ = attn(x, x, x)


def first_item(attn: Any, x: Tensor) -> Any:
    return x + attn(x, x, x)[0]


def with_keywords(attn: Any, x: Tensor) -> Any:
    out, _ = attn(query=x, key=x, value=x)
    return out


def with_stars(attn: Any, x: Tensor) -> Any:
    out, _weights = attn(*[x, x, x], **{"need_weights": True})
    return out


def by_forward(attn: Any, x: Tensor) -> Any:
    out, _ = attn.forward(x, x, x)
    return out


def in_a_loop(attn: Any, x: Tensor) -> Any:
    for _ in range(1):
        x, _ = attn(x, x, x)
    return x


def output_in_a_closure(attn: Any, x: Tensor) -> Any:
    out, _ = attn(x, x, x)
    return lambda: out


def output_in_a_global(attn: Any, x: Tensor) -> Any:
    global global_output
    global_output, _ = attn(x, x, x)
    return global_output


def over_two_lines(attn: Any, x: Tensor) -> Any:
    (
        out,
        _,
    ) = attn(
        x,
        x,
        x,
    )
    return out


def deleted(attn: Any, x: Tensor) -> Any:
    out, weights = attn(x, x, x)
    del weights
    return out


DISCARDING = [
    unpacked,
    unpacked_into_one_name,
    first_item,
    with_keywords,
    with_stars,
    by_forward,
    in_a_loop,
    output_in_a_closure,
    output_in_a_global,
    over_two_lines,
    deleted,
]


def weights_returned(attn: Any, x: Tensor) -> Any:
    _out, weights = attn(x, x, x)
    return weights


def weights_read_in_a_branch(attn: Any, x: Tensor) -> Any:
    out, weights = attn(x, x, x)
    if x.dim() == 3:
        return weights
    return out


def weights_read_in_the_next_round(attn: Any, x: Tensor) -> Any:
    weights = None
    for _ in range(2):
        before = weights
        x, weights = attn(x, x, x)
    return before


def weights_in_a_closure(attn: Any, x: Tensor) -> Any:
    _out, weights = attn(x, x, x)
    return (lambda: weights)()


def weights_in_locals(attn: Any, x: Tensor) -> Any:
    _out, weights = attn(x, x, x)
    return locals()["weights"]


def weights_in_eval(attn: Any, x: Tensor) -> Any:
    _out, weights = attn(x, x, x)  # noqa: RUF059
    return eval("weights")


def weights_in_an_attribute(attn: Any, x: Tensor) -> Any:
    _out, attn.seen = attn(x, x, x)
    return attn.seen


def weights_in_an_item(attn: Any, x: Tensor) -> Any:
    seen = {}
    _out, seen[0] = attn(x, x, x)
    return seen[0]


def both_returned(attn: Any, x: Tensor) -> Any:
    return attn(x, x, x)


def second_item(attn: Any, x: Tensor) -> Any:
    return attn(x, x, x)[1]


def last_item(attn: Any, x: Tensor) -> Any:
    return attn(x, x, x)[-1]


def stored_first(attn: Any, x: Tensor) -> Any:
    both = attn(x, x, x)
    return both[1]


def starred(attn: Any, x: Tensor) -> Any:
    _out, *rest = attn(x, x, x)
    return rest[0]


def by_a_helper(attn: Any, x: Tensor) -> Any:
    _out, weights = both_returned(attn, x)
    return weights


def by_map(attn: Any, x: Tensor) -> Any:
    ((_out, weights),) = map(attn, [x], [x], [x])
    return weights


READING = [
    weights_returned,
    weights_read_in_a_branch,
    weights_read_in_the_next_round,
    weights_in_a_closure,
    weights_in_locals,
    weights_in_eval,
    weights_in_an_attribute,
    weights_in_an_item,
    both_returned,
    second_item,
    last_item,
    stored_first,
    starred,
    by_a_helper,
    by_map,
]


@pytest.mark.parametrize("caller", DISCARDING)
def test_weights_that_are_thrown_away_are_not_computed(
    caller: Caller, attn: FlashMultiheadAttention, x: Tensor, recorder: Recorder
) -> None:
    caller(attn, x)

    assert recorder.count == 1


@pytest.mark.parametrize("caller", READING)
def test_weights_that_may_be_read_are_computed(
    caller: Caller, attn: FlashMultiheadAttention, x: Tensor, recorder: Recorder
) -> None:
    result = caller(attn, x)

    weights = result[1] if isinstance(result, tuple) else result
    assert weights.shape == (2, 3, 3)
    assert recorder.count == 0


def test_a_user_at_module_level_reads_them(attn: FlashMultiheadAttention, x: Tensor, recorder: Recorder) -> None:
    names: dict[str, Any] = {"attn": attn, "x": x, "__name__": "script"}

    exec("out, weights = attn(x, x, x)", names)

    assert names["weights"] is not None
    assert recorder.count == 0


@pytest.fixture(params=["module", "every module"])
def weights_seen(request: pytest.FixtureRequest, attn: FlashMultiheadAttention) -> Iterator[list[Any]]:
    seen: list[Any] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(module, FlashMultiheadAttention):
            seen.append(output[1])

    register = (
        attn.register_forward_hook if request.param == "module" else nn.modules.module.register_module_forward_hook
    )
    handle = register(hook)
    yield seen
    handle.remove()


def test_a_forward_hook_sees_the_weights(attn: FlashMultiheadAttention, x: Tensor, weights_seen: list[Any]) -> None:
    unpacked(attn, x)

    assert weights_seen[0].shape == (2, 3, 3)


def test_under_gradient_checkpointing_the_weights_are_computed(
    attn: FlashMultiheadAttention, x: Tensor, recorder: Recorder
) -> None:
    out, _ = checkpoint(attn, x, x, x, use_reentrant=False)
    out.sum().backward()

    assert recorder.count == 0


def test_a_container_that_passes_the_result_on_is_no_discarding_caller(
    attn: FlashMultiheadAttention, x: Tensor, recorder: Recorder
) -> None:
    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = attn

        def forward(self, x: Tensor) -> Any:
            return self.attn(x, x, x)

    _out, weights = Passing()(x)

    assert weights is not None


def test_the_user_is_found_behind_a_forward_that_this_package_replaced(x: Tensor, recorder: Recorder) -> None:
    attn = nn.MultiheadAttention(8, 2)
    site = MultiheadSite("attn", attn)
    # A function of the package, as techniques rebind `forward` to.
    package: dict[str, Any] = {"__name__": "lightning_accel.replaced", "site": site, "backend": recorder}
    exec("def forward(*args, **kwargs): return site.run(backend, None, args, kwargs)", package)
    attn.forward = package["forward"]  # type: ignore[method-assign]

    unpacked(attn, x)
    assert recorder.count == 1
    assert weights_returned(attn, x) is not None
    assert recorder.count == 1


def test_code_that_is_being_compiled_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)

    assert not caller_discards_weights()


def test_an_instruction_that_is_no_call_discards_nothing() -> None:
    code = unpacked.__code__

    assert not any(discards_second_item(code, offset) for offset in (-1, 0, 2, len(code.co_code)))


def test_every_place_in_the_code_is_judged_by_itself(
    attn: FlashMultiheadAttention, x: Tensor, recorder: Recorder
) -> None:
    def twice(x: Tensor) -> Any:
        x, _ = attn(x, x, x)
        x, weights = attn(x, x, x)
        return weights

    assert twice(x) is not None
    assert recorder.count == 1
