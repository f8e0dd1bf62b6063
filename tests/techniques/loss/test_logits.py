"""Logits that are left out: every way to a loss that does without them, and every way to read them after all."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel.techniques.loss import chunked_loss
from lightning_accel.techniques.loss.deferred import DeferredLogits
from support.loss_models import (
    TOKENS,
    VOCABULARY,
    WIDTH,
    LanguageModel,
    batches,
    loss_of_all,
    of_handle,
    side_by_side,
    start,
    train,
    watched,
)

pytestmark = [pytest.mark.numbers, pytest.mark.usefixtures("any_size")]

V = VOCABULARY


def following(tokens: Tensor) -> Tensor:
    return tokens.roll(-1, 1)


FUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "view": lambda logits, y: F.cross_entropy(logits.view(-1, V), y.view(-1)),
    "reshape by size": lambda logits, y: F.cross_entropy(logits.reshape(-1, logits.size(-1)), y.reshape(-1)),
    "flatten": lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()),
    "shifted": lambda logits, y: F.cross_entropy(logits[:, :-1].reshape(-1, V), y[:, 1:].reshape(-1)),
    "shifted, by dots": lambda logits, y: F.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, V), y[..., 1:].contiguous().view(-1)
    ),
    "transposed": lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y),
    "permuted": lambda logits, y: F.cross_entropy(logits.permute(0, 2, 1), y),
    "transposed twice": lambda logits, y: F.cross_entropy(logits.mT.mT.reshape(-1, V), y.reshape(-1)),
    "the last token": lambda logits, y: F.cross_entropy(logits[:, -1], y[:, -1]),
    "one token": lambda logits, y: F.cross_entropy(logits[0, -1], y[0, -1]),
    "those of a mask": lambda logits, y: F.cross_entropy(logits[y % 3 == 0], y[y % 3 == 0]),
    "cast": lambda logits, y: F.cross_entropy(logits.to(torch.float64).double().view(-1, V), y.view(-1)),
    "on its own device": lambda logits, y: F.cross_entropy(logits.to(logits.device).view(-1, V), y.view(-1)),
    "as a module": lambda logits, y: nn.CrossEntropyLoss(ignore_index=3)(logits.view(-1, V), y.view(-1)),
    "smoothed": lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y, label_smoothing=0.1),
    "weighted": lambda logits, y: F.cross_entropy(
        logits.view(-1, V), y.view(-1), weight=torch.linspace(0.1, 2, V, dtype=logits.dtype)
    ),
    "summed": lambda logits, y: F.cross_entropy(logits.view(-1, V), y.view(-1), reduction="sum") / y.numel(),
    "by keywords": lambda logits, y: F.cross_entropy(
        input=torch.reshape(input=logits, shape=(-1, V)), target=y.view(-1)
    ),
    "cloned": lambda logits, y: F.cross_entropy(logits.clone().view(-1, V), y.view(-1)),
    "moved to where they are": lambda logits, y: F.cross_entropy(
        logits.cpu().to("cpu", non_blocking=True).view(-1, V), y.view(-1)
    ),
    "with a dimension more": lambda logits, y: F.cross_entropy(logits.unsqueeze(0).squeeze(0).view(-1, V), y.view(-1)),
    "nothing but ignored": lambda logits, y: F.cross_entropy(
        logits.view(-1, V), torch.full_like(y, -100).view(-1), reduction="sum"
    ),
}


@pytest.mark.parametrize("loss", FUSED.values(), ids=FUSED)
def test_a_loss_is_computed_without_logits_and_is_the_plain_one(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    run = side_by_side(LanguageModel(bias=True), lambda model, tokens: loss(model(tokens), following(tokens)))
    assert run.num_fused == 3
    assert run.refused == {}


READ: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "its softmax is taken by hand": (
        lambda logits, y: F.nll_loss(F.log_softmax(logits.view(-1, V), 1), y.view(-1)),
        "torch.nn.functional.log_softmax",
    ),
    "scaled": (lambda logits, y: F.cross_entropy((logits * 0.5).view(-1, V), y.view(-1)), "torch.Tensor.mul"),
    "softcapped": (
        lambda logits, y: F.cross_entropy(3 * torch.tanh(logits / 3).view(-1, V), y.view(-1)),
        "torch.Tensor.div",
    ),
    "changed in place": (
        lambda logits, y: F.cross_entropy(logits.div_(2).view(-1, V), y.view(-1)),
        "torch.Tensor.div_",
    ),
    "changed in place through a view": (
        lambda logits, y: (logits.view(-1, V).mul_(2), F.cross_entropy(logits.view(-1, V), y.view(-1)))[1],
        "torch.Tensor.mul_",
    ),
    "a second loss": (
        lambda logits, y: F.cross_entropy(logits.view(-1, V), y.view(-1)) + F.cross_entropy(logits.mT, y),
        "a second loss",
    ),
    "a penalty on them": (
        lambda logits, y: F.cross_entropy(logits.view(-1, V), y.view(-1)) + 1e-3 * logits.logsumexp(-1).mean(),
        "torch.Tensor.logsumexp",
    ),
    "probabilities for targets": (
        lambda logits, y: F.cross_entropy(logits.view(-1, V), F.one_hot(y, V).to(logits.dtype).view(-1, V)),
        "torch.nn.functional.cross_entropy",
    ),
    "part of the classes": (
        lambda logits, y: F.cross_entropy(logits[..., :50].reshape(-1, 50), y.view(-1) % 50),
        "torch.Tensor.__getitem__",
    ),
    "token by token": (
        lambda logits, y: F.cross_entropy(logits.view(-1, V), y.view(-1), reduction="none").square().mean(),
        "a loss of every token by itself",
    ),
    "a function of autograd's": (lambda logits, y: Squared.apply(logits).mean(), "torch.Tensor.square"),
    "joined with others": (lambda logits, y: torch.cat([logits, logits], 1).sum(), "torch.cat"),
    "one by one": (lambda logits, y: torch.stack([row.sum() for row in logits]).sum(), "torch.Tensor.unbind"),
}


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * gradients[0] * ctx.saved_tensors[0]


@pytest.mark.parametrize(("loss", "reader"), READ.values(), ids=READ)
def test_logits_that_are_read_are_the_plain_ones_and_the_head_goes_back_with_the_reason(
    loss: Callable[[Tensor, Tensor], Tensor], reader: str
) -> None:
    run = side_by_side(LanguageModel(), lambda model, tokens: loss(model(tokens), following(tokens)), steps=4)
    assert f"its logits are read, by {reader}" in run.refused["head"]
    assert run.applied == []


def test_a_metric_after_the_loss_has_the_values_of_the_same_weights() -> None:
    seen: list[Tensor] = []

    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens)
        loss = F.cross_entropy(logits.view(-1, V), following(tokens).view(-1))
        with torch.no_grad():
            seen.append(logits.argmax(-1))
        return loss

    run = side_by_side(LanguageModel(), step, steps=4)
    assert all(torch.equal(plain, ours) for plain, ours in zip(seen[:4], seen[4:], strict=True))
    assert run.num_fused == 2  # then it has gone back
    assert "torch.Tensor.argmax" in run.refused["head"]


def test_logits_chosen_by_a_mask_are_those_that_it_chose_whatever_becomes_of_it() -> None:
    model, tokens = LanguageModel(), batches(1)[0]
    expected = model(tokens)[tokens % 3 == 0].argmax(-1)
    handle = start(model)
    with torch.no_grad(), handle.step("validate"):
        keep = tokens % 3 == 0
        chosen = model(tokens)[keep]
        assert type(chosen) is DeferredLogits
        keep.logical_not_()
        assert torch.equal(chosen.argmax(-1), expected)
    handle.undo()


def test_a_metric_every_third_step_does_not_cost_the_others_their_gain() -> None:
    count = iter(range(100))

    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens)
        loss = F.cross_entropy(logits.view(-1, V), following(tokens).view(-1))
        if next(count) % 3 == 0:
            logits.argmax(-1)
        return loss

    run = train(LanguageModel(), step, steps=9)
    assert run.num_fused == 9
    assert run.refused == {}


def test_asking_for_shape_and_the_like_computes_nothing() -> None:
    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens)
        assert type(logits) is DeferredLogits
        assert isinstance(logits, Tensor)
        assert logits.shape == (*tokens.shape, V)
        assert (logits.size(-1), logits.dim(), logits.ndim, len(logits), logits.numel()) == (V, 3, 3, 4, TOKENS * V)
        assert (logits.dtype, logits.device, logits.layout) == (torch.float32, tokens.device, torch.strided)
        assert logits.requires_grad
        assert not logits.is_leaf
        assert not logits.is_cuda
        assert logits.is_contiguous()
        assert not logits.mT.is_contiguous()
        assert logits.stride() == (12 * V, V, 1)
        assert torch.is_floating_point(logits)
        assert torch.is_tensor(logits)
        return F.cross_entropy(logits.view(-1, V), following(tokens).view(-1))

    assert train(LanguageModel(), step).num_fused == 3


@pytest.mark.parametrize(
    "read",
    [repr, copy.deepcopy, pickle.dumps, lambda x: np.asarray(x.detach()), lambda x: x.tolist(),
     lambda x: torch.isnan(x).any(), lambda x: x.data, lambda x: bool((x > 0).all())],
    ids=["print", "copy", "pickle", "numpy", "list", "isnan", "data", "bool"],
)  # fmt: skip
def test_whatever_else_is_done_with_them_is_done_with_the_values(read: Callable[[Tensor], Any]) -> None:
    model = LanguageModel()
    for parameter in model.parameters():
        parameter.requires_grad_(read not in (copy.deepcopy, pickle.dumps))
    tokens = batches(1)[0]
    expected = read(model(tokens))
    handle = start(model)
    with handle.step(), torch.set_grad_enabled(True):
        model.body.requires_grad_(False)
        logits = model(tokens)
        assert type(logits) is DeferredLogits
        found = read(logits)
    handle.undo()
    if isinstance(found, Tensor):
        assert type(found) is Tensor
        assert torch.equal(found, expected)
    elif isinstance(found, bytes):
        assert torch.equal(pickle.loads(found), pickle.loads(expected))
    else:
        assert np.array_equal(found, expected)


def test_no_operation_of_a_step_makes_a_tensor_of_tokens_by_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "_FEWEST_ROWS", {"cpu": 3})
    model, tokens = LanguageModel(), batches(1)[0]
    handle = start(model)
    for _ in range(2):  # the first tries the numbers
        with handle.step():
            loss = loss_of_all(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
    with watched() as seen:
        with handle.step():
            loss = loss_of_all(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
    handle.undo()
    assert seen.elements == V * WIDTH < TOKENS * V  # the gradient of the weight


def test_a_gradient_hook_on_logits_sees_their_gradient_if_it_comes_before_the_loss() -> None:
    seen: list[Tensor] = []

    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens)
        logits.register_hook(lambda gradient: seen.append(gradient))
        return F.cross_entropy(logits.view(-1, V), following(tokens).view(-1))

    side_by_side(LanguageModel(), step, steps=1)
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "ask", [lambda loss, logits: torch.autograd.grad(loss, logits), lambda loss, logits: logits.retain_grad()]
)
def test_asking_for_their_gradient_after_the_loss_raises_and_says_what_to_do(ask: Any) -> None:
    model, tokens = LanguageModel(), batches(1)[0]
    handle = start(model)
    with handle.step():
        logits = model(tokens)
        loss = F.cross_entropy(logits.view(-1, V), following(tokens).view(-1))
        with pytest.raises(RuntimeError, match=r"set techniques\.loss='off'"):
            ask(loss, logits)
    handle.undo()


def test_a_full_backward_hook_on_the_head_gets_the_gradient_of_the_logits() -> None:
    seen: list[Tensor] = []

    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        handle = model.head.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
        try:
            return loss_of_all(model, tokens)
        finally:
            handle.remove()

    run = side_by_side(LanguageModel(), step, steps=4)
    assert "its logits are read" in run.refused["head"]
    for got, want in zip(seen[4:], seen[:4], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_input_may_be_changed_in_place_after_the_head_was_called(mode: Any) -> None:
    model, tokens = LanguageModel(), batches(1)[0]

    def loss() -> Tensor:
        features = model.body(model.embedding(tokens))
        logits = model.head(features)
        features.zero_()
        return F.cross_entropy(logits.view(-1, V), following(tokens).view(-1))

    with mode():
        expected = loss()
    handle = start(model)
    with handle.step("validate"), mode():
        found = loss()
    assert of_handle(handle).heads["head"].num_fused == 1
    handle.undo()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_a_loss_for_the_log_does_not_stand_in_the_way_of_the_one_that_is_trained_on() -> None:
    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens).view(-1, V)
        with torch.no_grad():
            F.cross_entropy(logits, following(tokens).view(-1), reduction="sum")
        return F.cross_entropy(logits, following(tokens).view(-1))

    assert side_by_side(LanguageModel(), step).num_fused == 6


def test_with_the_input_changed_in_place_before_they_are_read_it_raises_rather_than_be_wrong() -> None:
    head = nn.Linear(8, V)
    handle = start(head)
    x = torch.randn(TOKENS, 8)
    with handle.step():
        logits = head(x)
        x.zero_()
        with pytest.raises(RuntimeError, match="changed in place after the head was called"):
            logits.sum()
        del logits
    handle.undo()
