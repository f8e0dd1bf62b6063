"""What torch's own compiler takes for attention is taken for it here: in training, inference and half precision."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from lightning_accel.techniques.flash_attention.hand_written import HandWrittenSite
from support.attention_inductor import PATTERNS, WITH_DROPOUT, WITH_EMPTY_ROWS_AS_ZEROS
from support.errors import relative_error
from support.techniques.flash_attention.hand_written_runs import ROUNDING, SDPA, assert_same, batch, make, results, run
from support.techniques.flash_attention.recorder import Recorder

pytestmark = pytest.mark.numbers

QUICK = (1, 3, 13, 16, 19, 28, 29, 30)
"""Of half precision and of dropout: plain, dropped, in three dimensions, masked in float32, causal, taken apart."""


def patterns(numbers: Iterable[int]) -> pytest.MarkDecorator:
    """Those of :data:`QUICK`, and the others in `make test-slow`."""
    marked = [pytest.param(number, marks=[] if number in QUICK else [pytest.mark.slow]) for number in numbers]
    return pytest.mark.parametrize("number", marked)


def test_each_pattern_of_this_torch_has_its_case() -> None:
    fuse_attention = importlib.import_module("torch._inductor.fx_passes.fuse_attention")
    numbers = [name.removeprefix("_sfdp_pattern_") for name in vars(fuse_attention)]
    assert {int(number) for number in numbers if number.isdigit()} <= set(PATTERNS)


@pytest.mark.parametrize("number", PATTERNS)
def test_it_computes_what_it_did_with_gradients_and_without(number: int) -> None:
    module, recorder = make(PATTERNS[number]), Recorder()
    site, x = HandWrittenSite("attention", module), batch(2, 16)
    assert_same(module, site, x, backend=recorder)
    module.eval()
    with torch.no_grad():
        assert relative_error(tensors(run(site, x, recorder)), tensors(module(x))) < ROUNDING
    assert len(recorder.calls) == 2


@patterns(PATTERNS)
def test_in_float16_it_is_no_further_off_than_the_original(number: int) -> None:
    module, x = make(PATTERNS[number]), batch(2, 16)
    truth = [part.detach() for part in results(module, module, x)]
    module, recorder = module.half(), Recorder()
    site = HandWrittenSite("attention", module)
    plain = results(module, module, x.half())
    fused = results(module, lambda x: run(site, x, recorder), x.half())
    assert [part.dtype for part in fused] == [part.dtype for part in plain]
    assert relative_error(fused, truth) < 4 * relative_error(plain, truth) + 0.01
    assert len(recorder.calls) == 1


@patterns(sorted(WITH_DROPOUT))
def test_its_dropout_reaches_the_kernel(number: int) -> None:
    module, recorder = make(PATTERNS[number], dropout=0.3), Recorder()
    run(HandWrittenSite("attention", module), batch(2, 16), recorder)
    assert [call.dropout_p for call in recorder.calls] == [0.3]


@patterns(sorted(WITH_EMPTY_ROWS_AS_ZEROS))
def test_a_sample_of_nothing_but_padding_gets_zeros_where_it_did(number: int) -> None:
    module, x = make(PATTERNS[number]), batch(2, 16)
    x[1] = 0
    expected = results(module, module, x)
    actual = results(module, lambda x: run(HandWrittenSite("attention", module), x, SDPA), x)
    assert not any(part.isnan().any() for part in expected)
    assert relative_error(actual, expected) < ROUNDING


def tensors(outputs: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]
