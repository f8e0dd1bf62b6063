"""Checkpointing forgets activations, as counted, in the blocks that it finds or is given."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accel.core.report import AccelError, AccelWarning
from lightning_accel.engine import Engine
from support.models import TASKS, ResidualBlock, Task, TinyCNN, TinyTransformer, TransformerBlock
from support.techniques.gradient_checkpointing_cases import IN_FORCE_NOWHERE, MODES, Normed, checkpointed

MATMULS = {"mm", "addmm", "bmm"}

pytestmark = [pytest.mark.numbers, IN_FORCE_NOWHERE]


class CountingOperators(TorchDispatchMode):
    """Counts the operators that run while it is active, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def matmuls(self) -> int:
        return sum(self.count[name] for name in MATMULS)


def backward_counts(model: nn.Module, task: Task, handle: Engine | None, steps: int = 2) -> Counter[str]:
    """The operators of the last step's backward pass: its own, and those it recomputes."""
    for step in range(steps):
        inputs, targets = task.batch(step)
        with handle.step() if handle else nullcontext():
            loss = task.loss(model(inputs), targets)
        with CountingOperators() as counting:
            loss.backward()
    return counting.count


def saved_bytes(model: nn.Module, task: Task, handle: Engine | None, steps: int = 2) -> int:
    """The bytes that one step's forward pass keeps for its backward pass, parameters not counted."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for step in range(steps):
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        inputs, targets = task.batch(step)
        with handle.step() if handle else nullcontext(), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = task.loss(model(inputs), targets)
        loss.backward()
    return sum(kept.values())


# -- counted -------------------------------------------------------------------------------------------------------

BIG = Task(
    lambda: TinyTransformer(dim=32, blocks=6, dropout=0.0),
    lambda step: TASKS["transformer"].batch(step),
    TASKS["transformer"].loss,
)


def test_full_recomputes_every_matrix_product_once_and_selective_none() -> None:
    counts = {}
    for mode in (None, *MODES):
        model = BIG.model()
        handle = checkpointed(model, mode) if mode else None
        counts[mode] = backward_counts(model, BIG, handle)
    matmuls = {mode: sum(count[name] for name in MATMULS) for mode, count in counts.items()}
    # A block's six (qkv, two of attention, proj, two of the mlp), less the last one: nothing needs its output again.
    assert matmuls["full"] - matmuls[None] == 6 * 5
    assert matmuls["selective"] == matmuls[None]
    assert counts["selective"]["gelu"] == counts["full"]["gelu"] == 6
    assert counts[None]["gelu"] == 0


def test_full_saves_only_what_enters_a_block() -> None:
    model = BIG.model()
    plain = saved_bytes(BIG.model(), BIG, None)
    full = saved_bytes(model, BIG, checkpointed(model))
    assert full < 0.3 * plain


def test_selective_keeps_convolutions_and_recomputes_the_norms() -> None:
    counts = {}
    for mode in (None, *MODES):
        model = TASKS["cnn"].model()
        counts[mode] = backward_counts(model, TASKS["cnn"], checkpointed(model, mode) if mode else None)
    assert {mode: count["convolution"] for mode, count in counts.items()} == {None: 0, "full": 4, "selective": 0}
    assert {mode: count["native_batch_norm"] for mode, count in counts.items()} == {None: 0, "full": 4, "selective": 4}


# -- the blocks ----------------------------------------------------------------------------------------------------


def test_a_shared_block_is_checkpointed_once_and_serves_every_call() -> None:
    layer = TransformerBlock(8)
    plain = nn.Sequential(nn.Linear(8, 8), layer, layer, layer)
    model = copy.deepcopy(plain)
    handle = checkpointed(model)
    actual, expected = [], []
    for net, context, found in ((plain, nullcontext(), expected), (model, handle.step(), actual)):
        torch.manual_seed(5)
        with context:
            loss = net(torch.ones(2, 3, 8)).square().mean()
        loss.backward()
        found += [p.grad for p in net.parameters()]
    assert handle.report.applied("gradient_checkpointing") == ["1"]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("blocks", "sites"),
    [(["ResidualBlock"], ["blocks.0", "blocks.1"]), (["blocks.1"], ["blocks.1"]), (["stem", "head"], ["stem", "head"])],
)
def test_blocks_may_be_named(blocks: list[str], sites: list[str]) -> None:
    handle = checkpointed(TinyCNN(), blocks=blocks)
    assert handle.report.applied("gradient_checkpointing") == sites
    handle.undo()


def test_a_misnamed_block_is_an_error_and_the_model_is_untouched() -> None:
    model = TinyCNN()
    with pytest.raises(ValueError, match=r"No block matches 'ResidualBlok'; did you mean 'ResidualBlock'\?"):
        checkpointed(model, blocks=["blocks.0", "ResidualBlok"], memory_format="channels_last")
    assert not any("forward" in vars(m) for m in model.modules())
    assert model.stem.weight.is_contiguous()


def test_a_model_without_blocks_is_an_error_that_shows_how_to_name_some() -> None:
    with pytest.raises(ValueError, match=r"memory.checkpoint='full': Linear has no repeated blocks.*blocks=\["):
        checkpointed(nn.Linear(2, 2))


def test_strict_makes_an_error_of_finding_nothing() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.LazyLinear(8), nn.ReLU()) for _ in range(2)))
    with pytest.raises(AccelError, match="found no site"):
        checkpointed(model, strict=True)


def test_a_block_inside_another_technique_of_ours_is_not_checkpointed_twice() -> None:
    model = TASKS["cnn"].model()
    first = checkpointed(model)
    with pytest.warns(AccelWarning, match="already checkpointed"):
        second = checkpointed(model)
    assert backward_counts(model, TASKS["cnn"], first)["convolution"] == 4
    second.undo()
    assert backward_counts(model, TASKS["cnn"], first)["convolution"] == 4
    first.undo()
    assert backward_counts(model, TASKS["cnn"], None)["convolution"] == 0


def test_untried_blocks_are_checkpointed_as_asked() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Normed(nn.LayerNorm(8)), Normed(nn.LayerNorm(8)))
    handle = checkpointed(model, trust="unchecked")
    with handle.step():
        model(torch.ones(2, 8)).sum().backward()
    assert handle.report.applied("gradient_checkpointing") == ["1", "2"]
    handle.undo()


def test_a_residual_block_may_change_between_training_and_evaluation() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), ResidualBlock(), ResidualBlock())
    handle = checkpointed(model)
    for training in (True, False, True):
        model.train(training)
        with handle.step():
            loss = model(torch.randn(2, 3, 4, 4)).sum()
        loss.backward()
    assert int(model[1].bn1.num_batches_tracked) == 2
    handle.undo()


@pytest.mark.parametrize("mode", MODES)
def test_the_report_has_what_blocks_keep_with_it_and_without(mode: str) -> None:
    task = TASKS["transformer"]
    model = TinyTransformer()
    handle = checkpointed(model, mode)
    backward_counts(model, task, handle, steps=1)
    figures = [one.measured for one in handle.report.of("gradient_checkpointing").sites.values() if one.after == "ON"]
    assert len(figures) == len(handle.report.applied("gradient_checkpointing")) > 0
    for block in figures:
        assert block is not None
        assert 0 < (block.candidate_bytes or 0) < (block.original_bytes or 0)
    handle.undo()


def test_a_block_of_which_that_cannot_be_counted_is_checkpointed_all_the_same() -> None:
    class Unspeakable(ResidualBlock):
        def extra_repr(self) -> str:
            raise RuntimeError("by which calls of a kind are told")

    model = nn.Sequential(Unspeakable(8), Unspeakable(8))
    handle = checkpointed(model, "full")
    with handle.step():
        model(torch.randn(2, 8, 4, 4)).sum().backward()
    assert handle.report.applied("gradient_checkpointing") == ["0", "1"]
    handle.undo()
