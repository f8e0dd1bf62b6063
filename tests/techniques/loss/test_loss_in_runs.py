"""The loss gives way where logits are wanted otherwise, and trains as it did where they are not."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_accel import AccelWarning
from lightning_accel.techniques.loss.deferred import DeferredLogits
from support.loss_models import (
    VOCABULARY,
    LanguageModel,
    batches,
    loss_of_all,
    of_handle,
    side_by_side,
    start,
)

pytestmark = [pytest.mark.numbers, pytest.mark.usefixtures("any_size")]


def test_logits_kept_after_the_step_are_those_of_its_weights_and_then_the_head_goes_back() -> None:
    kept: list[Tensor] = []

    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens)
        kept.append(logits)
        return F.cross_entropy(logits.view(-1, VOCABULARY), tokens.roll(-1, 1).view(-1))

    run = side_by_side(LanguageModel(), step, steps=4)
    for plain, ours in zip(kept[:4], kept[4:], strict=True):
        torch.testing.assert_close(ours.detach(), plain.detach(), rtol=1e-12, atol=1e-14)
    assert "holds them after the step" in run.refused["head"]


def test_logits_kept_over_an_optimizers_step_within_the_step_are_those_before_it() -> None:
    def trained(model: nn.Module, *, plainly: bool) -> list[Tensor]:
        handle = start(model, loss="off" if plainly else "auto")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        seen = []
        for tokens in batches(2):
            with handle.step():
                optimizer.zero_grad()
                logits = model(tokens)
                F.cross_entropy(logits.view(-1, VOCABULARY), tokens.view(-1)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                seen.append(logits.detach().clone())
                del logits
        handle.undo()
        return seen

    model = LanguageModel().double()
    twin = copy.deepcopy(model)
    for ours, plain in zip(trained(model, plainly=False), trained(twin, plainly=True), strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-14)


def test_weights_that_are_written_past_autograd_after_the_backward_pass_do_not_reach_kept_logits() -> None:
    """``parameter.data`` counts no versions: what somebody holds is computed when the backward pass begins."""
    model, tokens = LanguageModel().double(), batches(1)[0]
    expected = model(tokens).detach()
    handle = start(model)
    with handle.step():
        logits = model(tokens)
        F.cross_entropy(logits.view(-1, VOCABULARY), tokens.view(-1)).backward()  # type: ignore[no-untyped-call]
        for parameter in model.parameters():
            parameter.data.zero_()
        assert torch.equal(logits.detach(), expected)
    handle.undo()


def test_nothing_of_a_step_stays_alive_after_it() -> None:
    model, tokens = LanguageModel(), batches(1)[0]
    alive: list[weakref.ref[Any]] = []
    model.head.register_forward_pre_hook(lambda module, args: alive.append(weakref.ref(args[0])))
    handle = start(model)
    with handle.step():
        loss = loss_of_all(model, tokens)
    loss.backward()  # type: ignore[no-untyped-call]
    del loss
    assert [ref() for ref in alive] == [None]
    handle.undo()


def test_a_step_that_raises_leaves_the_next_one_as_ever() -> None:
    model, tokens = LanguageModel(), batches(1)[0]
    handle = start(model)

    def failing_step() -> None:
        with handle.step():
            model(tokens)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_step()
    assert type(model(tokens)) is Tensor  # outside of a step nothing is left out
    with handle.step():
        loss_of_all(model, tokens)
    assert of_handle(handle).heads["head"].num_fused == 1
    handle.undo()


# -- where it gives way ----------------------------------------------------------------------------------------------


def test_inside_a_checkpoint_the_head_computes_its_logits() -> None:
    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        x = model.embedding(tokens)  # type: ignore[operator]
        found: Tensor = checkpoint(lambda x: loss_of(model.head(x), tokens), x, use_reentrant=False)  # type: ignore[operator]
        return found

    def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(logits.view(-1, VOCABULARY), tokens.view(-1))

    assert side_by_side(LanguageModel(), step).num_fused == 0


def test_inside_a_reentrant_checkpoint_the_head_computes_its_logits() -> None:
    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = checkpoint(model.head, model.embedding(tokens), use_reentrant=True)  # type: ignore[operator]
        return F.cross_entropy(logits.view(-1, VOCABULARY), tokens.view(-1))

    assert side_by_side(LanguageModel(), step).num_fused == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_loss_that_is_checkpointed_by_itself_is_the_plain_one(reentrant: bool) -> None:
    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        found: Tensor = checkpoint(loss_of, model(tokens), tokens, use_reentrant=reentrant)
        return found

    def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
        return F.cross_entropy(logits.view(-1, VOCABULARY), tokens.view(-1))

    side_by_side(LanguageModel(), step, steps=4)


def test_beside_sparse_activations_which_watch_what_is_saved_it_acts() -> None:
    assert side_by_side(LanguageModel(), loss_of_all, sparse_activations="auto").num_fused == 3


def test_under_functorch_the_head_computes_its_logits() -> None:
    model, tokens = LanguageModel(), batches(1)[0]
    handle = start(model)
    with handle.step():
        found = torch.func.vmap(lambda one: model(one[None])[0])(tokens)
        assert type(found) is Tensor
    handle.undo()


def test_in_validation_too_the_loss_does_without_logits() -> None:
    model, tokens = LanguageModel(), batches(1)[0]
    expected = loss_of_all(model, tokens)
    handle = start(model)
    with torch.no_grad(), handle.step("validate"):
        assert type(model(tokens)) is DeferredLogits
        torch.testing.assert_close(loss_of_all(model, tokens), expected)
    with torch.inference_mode(), handle.step("test"):
        torch.testing.assert_close(loss_of_all(model, tokens), expected)
    with torch.no_grad(), handle.step("predict"):
        assert type(model(tokens)) is Tensor
    handle.undo()


def test_a_metric_in_validation_does_not_cost_training_its_gain() -> None:
    model, tokens = LanguageModel(), batches(1)[0]
    handle = start(model)
    for _ in range(3):
        with torch.no_grad(), handle.step("validate"):
            model(tokens).argmax(-1)
    with torch.no_grad(), handle.step("validate"):
        assert type(model(tokens)) is Tensor
    with handle.step():
        assert type(model(tokens)) is DeferredLogits
    assert "in pieces while training; in validate its logits are read" in handle.report.to_text()
    handle.undo()


# -- a run -----------------------------------------------------------------------------------------------------------


def test_copies_and_pickles_of_the_model_are_plain_and_state_dicts_the_same() -> None:
    model, tokens = LanguageModel(), batches(1)[0]
    keys = list(model.state_dict())
    handle = start(model)
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert list(model.state_dict()) == keys
    with handle.step():
        assert type(copied(tokens)) is Tensor
        assert type(loaded(tokens)) is Tensor
    handle.undo()
    assert "forward" not in vars(model.head)


def test_live_trials_may_switch_it_once_it_acts_and_off_is_the_users_own_code() -> None:
    model, tokens = LanguageModel(), batches(1)[0]
    handle = start(model)
    assert list(handle.engine.arms()) == []
    with handle.step():
        loss_of_all(model, tokens)
    [arm] = handle.engine.arms()
    assert (arm.name, arm.choices, arm.saves_memory) == ("loss", ("on",), True)
    arm.choose("off")
    with handle.step():
        assert type(model(tokens)) is Tensor
    arm.choose("on")
    with handle.step():
        assert type(model(tokens)) is DeferredLogits
    handle.undo()


def test_what_was_asked_for_is_not_on_trial() -> None:
    model, tokens = LanguageModel(), batches(1)[0]
    handle = start(model, loss="on")
    with handle.step():
        loss_of_all(model, tokens)
    assert list(handle.engine.arms()) == []
    handle.undo()


def test_asked_for_and_found_nowhere_it_warns() -> None:
    with pytest.warns(AccelWarning, match="loss was asked for and found no site"):
        start(nn.Conv2d(1, 1, 1), loss="on").undo()


def test_accumulated_gradients_are_the_plain_ones() -> None:
    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        (loss_of_all(model, tokens[:2]) / 2).backward()  # type: ignore[no-untyped-call]
        return loss_of_all(model, tokens[2:]) / 2

    assert side_by_side(LanguageModel(), step).num_fused == 6
