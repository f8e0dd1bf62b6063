"""The technique in a run: which heads it takes, when it gives them back, and what it must never do to a training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_accel.techniques.loss import heads, technique
from lightning_accel.techniques.loss.chunked_loss import linear_cross_entropy
from lightning_accel.techniques.loss.heads import compared
from support.loss_models import (
    TOKENS,
    VOCABULARY,
    WIDTH,
    LanguageModel,
    batches,
    loss_of_all,
    side_by_side,
    start,
    train,
)

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
