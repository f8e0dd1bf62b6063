"""``on_oom="split"``: a batch that does not fit goes through its step in parts, which the run does not notice.

Memory is simulated here, and runs out for real in test_out_of_memory.py.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_accel import AccelPlugin
from lightning_accel.core.report import AccelWarning
from lightning_accel.lightning import step_retry
from support.plugin.tight import (
    FITS,
    Batches,
    InBackward,
    MakeTrainer,
    Reads,
    Tight,
    assert_same,
    ended,
    fit,
    vectors,
)

pytestmark = pytest.mark.numbers


# -- the same training --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Tight, InBackward])
def test_losses_and_weights_are_those_of_the_whole_batch(make_trainer: MakeTrainer, kind: type[Tight]) -> None:
    plain, *_ = fit(make_trainer, kind())
    model, _, plugin = fit(make_trainer, kind(FITS))
    assert_same(model, plain)
    assert plugin.report.of("out_of_memory").status == "batches in parts of at most 3 samples"


def test_parts_are_as_few_as_fit_and_batches_that_fit_stay_whole(make_trainer: MakeTrainer) -> None:
    model, *_ = fit(make_trainer, Tight(FITS))
    assert model.calls == [(0, 2), (1, 3), (1, 2), (2, 2), (2, 2), (3, 1), (4, 3), (4, 2)]


def test_halves_that_do_not_fit_are_halved(make_trainer: MakeTrainer) -> None:
    plain, *_ = fit(make_trainer, Tight())
    model, _, plugin = fit(make_trainer, Tight(1))
    assert_same(model, plain)
    assert plugin.state_dict()["out_of_memory"][-1] == ("split", 1)


class Float32(InBackward):
    def __init__(self, most: float = math.inf) -> None:
        super().__init__(most)
        self.float()
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(sum(float(p.grad.square().sum()) for p in self.parameters() if p.grad is not None) ** 0.5)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
def test_scaler_and_clipping_see_the_gradients_of_the_whole(make_trainer: MakeTrainer, precision: str) -> None:
    options = {
        "settings": {"precision": precision},
        "gradient_clip_val": 0.1,
        "batches": Batches(lambda size: torch.randn(size, 4)),
    }
    plain, *_ = fit(make_trainer, Float32(), **options)
    model, *_ = fit(make_trainer, Float32(FITS), **options)
    assert sum(map(math.isfinite, model.norms)) >= 4  # a scaler's first step may overflow
    torch.testing.assert_close(model.losses, plain.losses, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(model.norms, plain.norms, rtol=2e-2, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("sizes", [[2, 2, 5, 4, 5, 5], [5, 5, 4, 2]], ids=["the first of two", "both"])
def test_gradients_of_earlier_batches_stay_where_a_forward_pass_runs_out(
    make_trainer: MakeTrainer, sizes: list[int]
) -> None:
    options: dict[str, Any] = {"batches": Batches(sizes=sizes), "accumulate_grad_batches": 2}
    plain, *_ = fit(make_trainer, Tight(), **options)
    model, *_ = fit(make_trainer, Tight(FITS), **options)
    assert_same(model, plain)


class Regularised(Tight):
    """A loss that has nothing to do with the batch."""

    def loss(self, batch: Any) -> Tensor:
        self.predictions(batch)
        return sum(p.square().sum() for p in self.parameters())  # type: ignore[return-value]


def test_a_loss_that_does_not_depend_on_the_batch_counts_once(make_trainer: MakeTrainer) -> None:
    plain, *_ = fit(make_trainer, Regularised())
    model, *_ = fit(make_trainer, Regularised(FITS))
    assert_same(model, plain)


class ZeroesByHand(Tight):
    """Keeps gradients where they are, and looks at them before they are zeroed."""

    def __init__(self, most: float = math.inf) -> None:
        super().__init__(most)
        self.seen: list[float] = []

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen.append(sum(float(p.grad.sum()) for p in self.parameters() if p.grad is not None))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


def test_hooks_that_read_gradients_before_they_are_zeroed_find_them(make_trainer: MakeTrainer) -> None:
    plain, *_ = fit(make_trainer, ZeroesByHand())
    model, *_ = fit(make_trainer, ZeroesByHand(FITS))
    assert_same(model, plain)
    torch.testing.assert_close(model.seen, plain.seen, rtol=1e-9, atol=1e-9)


def test_gradients_that_nobody_reads_go_before_those_of_the_parts_come(make_trainer: MakeTrainer) -> None:
    """Else a step in parts would need memory for one more set of gradients than a whole one."""

    class Looks(Tight):
        def __init__(self) -> None:
            super().__init__(FITS)
            self.held: list[bool] = []

        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            self.held.append(self.net[0].weight.grad is not None)
            return loss

    # The plugin's own logger has a hook there, and reads no gradients.
    model, *_ = fit(make_trainer, Looks(), Batches(sizes=[2, 5]), settings={"report": True})
    assert model.held == [False, False, True]  # first step; first part of the second; its second part


# -- said, kept, and resumed --------------------------------------------------------------------------------------


def test_it_is_said_at_once_and_in_the_report(make_trainer: MakeTrainer) -> None:
    plugin = AccelPlugin(precision="32-true", memory={"on_oom": "split"}, report=False)
    with pytest.warns(AccelWarning, match="gives the same gradients where the loss is a mean over samples"):
        make_trainer(plugins=[plugin]).fit(Tight(FITS), DataLoader(Batches(), batch_size=None))
    (note,) = plugin.report.notes
    assert note.startswith("out of memory: ")
    assert "batches in parts of at most 3 samples put on at step 1: it needed more than " in note
    assert plugin.report.of("out_of_memory").is_on


@pytest.mark.parametrize("setting", ["split", "answer"])
def test_a_resumed_run_begins_split_if_that_is_still_wished(
    make_trainer: MakeTrainer, tmp_path: Path, setting: str
) -> None:
    _, trainer, _ = fit(make_trainer, Tight(FITS))
    trainer.save_checkpoint(tmp_path / "split.ckpt")
    options = {"ckpt_path": tmp_path / "split.ckpt", "max_epochs": 2, "settings": {"memory": {"on_oom": setting}}}
    resumed, _, plugin = fit(make_trainer, Tight(), **options)
    assert resumed.calls[1:3] == ([(1, 3), (1, 2)] if setting == "split" else [(1, 5), (2, 4)])
    is_told = any("without memory.on_oom='split'" in note for note in plugin.report.notes)
    assert is_told == (setting == "answer")


class Bare(Tight):
    """Has nothing that could be checkpointed."""

    def __init__(self, most: float) -> None:
        super().__init__(most)
        self.net = nn.Linear(4, 3).double()


def test_steps_in_parts_have_no_net_of_their_own(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    spread: list[int] = []

    class Watched(step_retry.Attempt):
        def __init__(self, *args: Any, **options: Any) -> None:
            spread.append(1)
            super().__init__(*args, **options)

    monkeypatch.setattr(step_retry, "Attempt", Watched)
    model, _, plugin = fit(make_trainer, Bare(FITS), Batches(sizes=[5] * 12))
    assert plugin.state_dict()["out_of_memory"] == [("split", 3)]
    assert len(model.calls) == 24
    assert len(spread) == 3  # under the first steps of every run


# -- what is not split --------------------------------------------------------------------------------------------


def test_one_sample_that_does_not_fit_ends_with_the_page(make_trainer: MakeTrainer) -> None:
    page = ended(make_trainer, Tight(0))
    assert "and change no number, and the batch cannot be split: a single sample at a time is the least." in page
    assert "memory.on_oom='split': batches in parts of at most 1 samples" in page


class Shrinks(Tight):
    """Has room for less and less."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.most = FITS - batch_idx


def test_the_page_names_what_was_put_on_before(make_trainer: MakeTrainer) -> None:
    page = ended(make_trainer, Shrinks(FITS), Batches(sizes=[5] * 5))
    assert "Training step 4 of epoch 0 ran out of memory in one of its parts: nothing is left" in page
    assert "  memory=MemoryOptions(checkpoint='selective'): in force (1 sites)\n" in page
    assert "  memory.on_oom='split': batches in parts of at most 1 samples\n" in page


def test_a_batch_that_cannot_be_split_ends_with_the_page(make_trainer: MakeTrainer) -> None:
    batches = Batches(lambda size: (vectors(size), torch.ones(7)))
    page = ended(make_trainer, Reads(FITS), batches)
    assert "the batch cannot be split: the first dimensions of its tensors differ: 5, 7" in page


def test_a_batch_of_another_kind_goes_through_whole_and_the_report_says_why(make_trainer: MakeTrainer) -> None:
    batches = Batches(lambda size: vectors(size) if size > FITS else (vectors(size), torch.ones(7)), [5, 3])
    model, _, plugin = fit(make_trainer, Reads(FITS), batches)
    assert len(model.losses) == 2
    why = "memory.on_oom='split': a batch went through its step whole: the first dimensions of its tensors differ: 3, 7"
    assert why in plugin.report.notes


class ByHand(Tight):
    def __init__(self, most: float) -> None:
        super().__init__(most)
        self.automatic_optimization = False


def test_manual_optimization_is_left_to_the_module(make_trainer: MakeTrainer) -> None:
    assert "with manual optimization it is the module that goes backward" in ended(make_trainer, ByHand(FITS))


class StepsInBackward(Tight):
    """An optimizer that steps as soon as a gradient is there."""

    def configure_optimizers(self) -> Any:
        self.net[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
        return super().configure_optimizers()


def test_hooks_on_gradients_would_be_called_for_every_part(make_trainer: MakeTrainer) -> None:
    page = ended(make_trainer, StepsInBackward(FITS))
    assert "hooks on the gradient of 'net.0.weight' would be called for every part" in page


class TakesFiveOnly(Tight):
    def loss(self, batch: Any) -> Tensor:
        if len(batch) not in (2, 5):
            raise ValueError("this model takes batches of five")
        return super().loss(batch)


def test_a_module_that_raises_in_parts_is_not_split(make_trainer: MakeTrainer) -> None:
    page = ended(make_trainer, TakesFiveOnly(FITS))
    assert "in parts of 3 samples a step raised ValueError: this model takes batches of five" in page


def test_where_other_processes_might_wait_nothing_is_split(make_trainer: MakeTrainer) -> None:
    try:
        page = ended(make_trainer, Tight(FITS), strategy="ddp", devices=1)
    finally:
        torch.distributed.destroy_process_group()
    assert "batches are not split under DDPStrategy" in page


def test_gradients_that_were_added_to_earlier_ones_are_not_taken_back(make_trainer: MakeTrainer) -> None:
    page = ended(make_trainer, InBackward(FITS), accumulate_grad_batches=2)
    assert "in its backward pass: its gradients were added to those of earlier batches" in page


def test_without_the_wish_a_batch_is_never_split_and_the_page_names_it(make_trainer: MakeTrainer) -> None:
    page = ended(make_trainer, Tight(FITS), settings={"memory": {"on_oom": "answer"}})
    assert "nothing is left that would need less memory and change no number." in page
    assert "  AccelPlugin(memory=MemoryOptions(on_oom='split'))  # about " in page
    assert "    YAML: memory: {on_oom: split}" in page
