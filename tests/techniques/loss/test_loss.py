"""The technique in a run: which heads it takes, when it gives them back, and what it must never do to a training."""

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
from lightning_accel.techniques.loss import heads, technique
from lightning_accel.techniques.loss.chunked_loss import linear_cross_entropy
from lightning_accel.techniques.loss.deferred import DeferredLogits
from lightning_accel.techniques.loss.heads import compared
from support.loss_models import (
    TOKENS,
    VOCABULARY,
    WIDTH,
    LanguageModel,
    any_size,
    batches,
    loss_of_all,
    of_handle,
    side_by_side,
    start,
    train,
)

__all__ = ["any_size"]

pytestmark = [pytest.mark.numbers, pytest.mark.usefixtures("any_size")]


# -- what it acts on -------------------------------------------------------------------------------------------------


def test_a_vocabulary_of_a_few_classes_is_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(technique, "FEWEST_CLASSES", VOCABULARY + 1)
    assert train(LanguageModel(), loss_of_all).applied == []


def test_logits_that_fit_in_caches_are_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(technique, "SMALLEST_BYTES", TOKENS * VOCABULARY * 4 + 1)
    run = train(LanguageModel(), loss_of_all)
    assert (run.num_fused, run.refused) == (0, {})


def test_layers_within_repeated_blocks_are_no_heads() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, VOCABULARY), nn.Linear(VOCABULARY, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).relu())  # type: ignore[no-any-return]

    model = LanguageModel()
    model.body = nn.Sequential(Wide(), Wide())
    run = train(model, loss_of_all)
    assert list(run.applied) == ["head"]
    assert run.refused == {}


def test_a_subclass_of_linear_is_left_alone_with_the_reason() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) / 8

    model = LanguageModel()
    model.head = Scaled(WIDTH, VOCABULARY)
    run = side_by_side(model, loss_of_all)
    assert run.refused == {"head": "a Scaled, which may compute otherwise than nn.Linear"}


def test_a_parametrized_head_is_left_alone() -> None:
    model = LanguageModel()
    nn.utils.parametrizations.weight_norm(model.head)
    run = side_by_side(model, loss_of_all)
    assert "ParametrizedLinear" in run.refused["head"]


def test_a_forward_of_the_users_own_on_the_instance_is_left_alone() -> None:
    model = LanguageModel()
    model.head.forward = lambda x: F.linear(x, model.head.weight) * 2  # type: ignore[method-assign]
    assert train(model, loss_of_all).refused == {"head": "its forward is not the one of its class"}


def test_a_compiled_model_is_left_alone() -> None:
    model = LanguageModel()
    model.compile(backend="eager")
    assert train(model, loss_of_all).refused == {"head": "inside a compiled module"}
    torch._dynamo.reset()


# -- numbers ---------------------------------------------------------------------------------------------------------


def test_a_weight_tied_to_the_embedding_gets_the_sum_of_both_gradients() -> None:
    assert side_by_side(LanguageModel(tied=True), loss_of_all).num_fused == 3


def test_a_frozen_head_and_a_frozen_body_train_as_plainly() -> None:
    model = LanguageModel()
    model.head.requires_grad_(False)
    assert side_by_side(model, loss_of_all).num_fused == 3
    model = LanguageModel()
    model.embedding.requires_grad_(False)
    model.body.requires_grad_(False)
    assert side_by_side(model, loss_of_all).num_fused == 3


def test_two_losses_on_two_calls_of_one_head_both_do_without_logits() -> None:
    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        return loss_of_all(model, tokens) + 0.3 * loss_of_all(model, tokens.flip(1))

    assert side_by_side(LanguageModel(), step).num_fused == 6


def test_of_several_losses_of_few_rows_the_first_alone_keeps_a_gradient_as_large_as_the_weight() -> None:
    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        return sum(loss_of_all(model, part) for part in tokens[:3, :6].split(2, 1))  # type: ignore[return-value]

    asked = side_by_side(LanguageModel(), step, setting="on")
    assert asked.num_fused == 9
    by_itself = side_by_side(LanguageModel(), step)
    assert by_itself.num_fused == 2  # of two steps, after which the head goes back
    assert "one of several losses of few rows" in by_itself.refused["head"]


def test_a_gradient_penalty_through_the_loss_has_its_second_derivatives() -> None:
    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        loss = loss_of_all(model, tokens)
        (gradient,) = torch.autograd.grad(loss, [model.embedding.weight], create_graph=True)  # type: ignore[list-item]
        return loss + gradient.square().sum()

    assert side_by_side(LanguageModel(), step).num_fused == 3


def test_token_by_token_it_acts_where_it_was_asked_for() -> None:
    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens)
        losses = F.cross_entropy(logits.transpose(1, 2), tokens.roll(-1, 1), reduction="none")
        return (losses * torch.linspace(0, 1, tokens.shape[1], dtype=losses.dtype)).mean()

    assert side_by_side(LanguageModel(), step, setting="on").num_fused == 3


def test_under_autocast_product_and_loss_have_the_dtypes_they_would_have() -> None:
    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens)
            assert logits.dtype == torch.bfloat16
            return F.cross_entropy(logits.view(-1, VOCABULARY), tokens.roll(-1, 1).view(-1))

    plain, ours = LanguageModel(), LanguageModel()
    ours.load_state_dict(plain.state_dict())
    expected, found = train(plain, step, setting=None), train(ours, step)
    assert found.num_fused == 3
    assert [x.dtype for x in found.losses] == [x.dtype for x in expected.losses]
    torch.testing.assert_close(torch.stack(found.losses), torch.stack(expected.losses), rtol=2e-2, atol=0)


def test_a_computation_with_other_numbers_is_refused_at_its_first_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss in pieces that is off by a percent."""
    wrong = lambda problem: 1.01 * linear_cross_entropy(problem)  # noqa: E731
    monkeypatch.setattr(heads, "linear_cross_entropy", wrong)
    run = side_by_side(LanguageModel(), loss_of_all)
    assert run.num_fused == 0
    assert "other numbers than the original" in run.refused["head"]


def test_label_smoothing_that_is_annealed_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, smoothing = [], iter((0.3, 0.2, 0.1, 0.0, 0.0))
    monkeypatch.setattr(heads, "compared", lambda *args: (tried.append(args), compared(*args))[1])

    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens).view(-1, VOCABULARY)
        return F.cross_entropy(logits, tokens.view(-1), label_smoothing=next(smoothing))

    assert train(LanguageModel(), step, steps=5).num_fused == 5
    assert len(tried) == 2  # once with, once without


def test_it_is_tried_on_rows_that_count_where_the_first_ones_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "linear_cross_entropy", lambda problem: 1.01 * linear_cross_entropy(problem))

    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        target = tokens.roll(-1, 1).flatten()
        target[: heads.ROWS] = -100
        return F.cross_entropy(model(tokens).view(-1, VOCABULARY), target)

    assert "other numbers than the original" in side_by_side(LanguageModel(), step).refused["head"]


def test_smoothing_with_class_weights_is_as_exact_under_autocast_as_without() -> None:
    def step(model: nn.Module, tokens: Tensor) -> Tensor:
        weight = torch.linspace(0.1, 3, VOCABULARY)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens).view(-1, VOCABULARY)
            return F.cross_entropy(logits, tokens.roll(-1, 1).view(-1), weight, label_smoothing=0.9)

    plain, ours = LanguageModel().float(), LanguageModel().float()
    ours.load_state_dict(plain.state_dict())
    (expected,), found = train(plain, step, setting=None, steps=1).losses, train(ours, step, steps=1)
    assert found.num_fused == 1
    torch.testing.assert_close(found.losses[0], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("compiled_first", [True, False])
def test_a_step_that_is_compiled_as_a_whole_is_compiled_without_us(compiled_first: bool) -> None:
    model, tokens = LanguageModel(), batches(1)[0]

    def compiled() -> Any:
        return torch.compile(lambda tokens: loss_of_all(model, tokens), backend="eager", fullgraph=True)

    step = compiled() if compiled_first else None
    handle = start(model)
    step = step or compiled()
    with handle.step():
        found = step(tokens)
    handle.undo()
    torch.testing.assert_close(found, loss_of_all(model, tokens), rtol=1e-12, atol=0)
    torch._dynamo.reset()


def test_the_trial_leaves_random_streams_and_gradients_as_they_are() -> None:
    model, tokens = LanguageModel(), batches(1)[0]
    handle = start(model)
    before = torch.get_rng_state()
    with handle.step():
        loss_of_all(model, tokens)
    handle.undo()
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


# -- logits that outlive their time ----------------------------------------------------------------------------------


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
