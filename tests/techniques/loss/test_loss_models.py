"""Whole models: transformers' losses as they are written there, classifiers with many classes, Lightning's Trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_accel import AccelPlugin
from lightning_accel.core.host import Host
from lightning_accel.engine import Engine
from lightning_accel.experiment.tolerance import deviation
from lightning_accel.settings import Plan
from lightning_accel.techniques.base import BuildContext
from lightning_accel.techniques.loss import technique
from support.gpu_sizes import on_gpu
from support.huggingface_models import VOCABULARY, tiny_models
from support.loss_models import LanguageModel, of_handle, start
from support.scripts import SUPPORT, run_script

pytestmark = pytest.mark.numbers


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(technique, "FEWEST_CLASSES", VOCABULARY)
    monkeypatch.setattr(technique, "SMALLEST_BYTES", 0)


def losses_of(
    model: nn.Module, batch: dict[str, Tensor], setting: str, steps: int = 3
) -> tuple[list[Tensor], int, str]:
    handle = start(model, loss=setting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        with handle.step():
            loss = model(**batch).loss
        loss.backward()
        losses += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    num_fused = sum(head.num_fused for head in of_handle(handle).heads.values()) if setting != "off" else 0
    report = handle.report.to_text()
    handle.undo()
    return losses, num_fused, report


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "t5"])
def test_transformers_own_losses_do_without_logits(family: str) -> None:
    """With the shift, the cast to float32 and the ignored labels that they have; GPT-2's and T5's heads are tied."""
    make, batch = tiny_models()[family]
    model, given = make().train(), batch()
    twin = copy.deepcopy(model)
    expected, _, _ = losses_of(twin, given, "off")
    found, num_fused, report = losses_of(model, given, "auto")
    assert num_fused == 3, report
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


def test_transformers_losses_by_the_number_of_items_do_without_logits() -> None:
    """As its own Trainer asks for them: summed, and divided by the labels of several micro-batches."""
    make, batch = tiny_models()["llama"]
    model = make()
    given = batch()
    expected = model(**given, num_items_in_batch=torch.tensor(40)).loss
    handle = start(model)
    with handle.step():
        loss = model(**given, num_items_in_batch=torch.tensor(40)).loss
    torch.testing.assert_close(loss, expected)
    assert sum(head.num_fused for head in of_handle(handle).heads.values()) == 1
    handle.undo()


def test_a_models_output_that_keeps_logits_dies_with_the_step() -> None:
    """``out`` holds them; that costs nothing where a function's end takes it away."""
    make, batch = tiny_models()["gpt2"]
    model, given = make(), batch()

    def training_step() -> Tensor:
        out = model(**given)
        assert out.logits.shape[-1] == VOCABULARY
        loss: Tensor = out.loss
        return loss

    handle = start(model)
    for _ in range(4):
        with handle.step():
            loss = training_step()
        loss.backward()  # type: ignore[no-untyped-call]
    assert handle.report.refused("loss") == {}
    handle.undo()


class Language(LightningModule):
    def __init__(
        self, after: Callable[[LightningModule, Tensor, Tensor], Any] = lambda module, logits, loss: loss
    ) -> None:
        super().__init__()
        self.model = LanguageModel()
        self.after = after
        self.losses: list[float] = []

    def training_step(self, tokens: Tensor, index: int) -> Any:
        logits = self.model(tokens)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), tokens.roll(-1, 1).view(-1))
        self.log("loss", loss)
        self.losses.append(loss.item())
        return self.after(self, logits, loss)

    def validation_step(self, tokens: Tensor, index: int) -> None:
        logits = self.model(tokens)
        self.log("val_loss", F.cross_entropy(logits.mT, tokens.roll(-1, 1)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(torch.randint(96, (24, 12), generator=generator), batch_size=4)

    val_dataloader = train_dataloader


def fitted(module: Language, make_trainer: Callable[..., Trainer], *plugins: Any) -> Language:
    make_trainer(plugins=list(plugins), max_epochs=1).fit(module)
    return module


def plugin(**settings: Any) -> AccelPlugin:
    return AccelPlugin.from_plan(Plan().replace(precision="32-true", trust="checked", report=False, **settings))


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
def test_under_a_trainer_training_and_validation_do_without_logits(make_trainer: Callable[..., Trainer]) -> None:
    module = Language()
    twin = copy.deepcopy(module)
    fitted(twin, make_trainer)
    ours = plugin()
    fitted(module, make_trainer, ours)
    assert module.losses == pytest.approx(twin.losses, rel=1e-5)
    assert module.state_dict().keys() == twin.state_dict().keys()
    assert "model.head: its cross-entropy is computed in pieces" in ours.report.to_text()
    assert ours.report.refused("loss") == {}


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
def test_logits_that_a_training_step_returns_are_there_for_callbacks(make_trainer: Callable[..., Trainer]) -> None:
    seen: list[Tensor] = []

    class Watching(Language):
        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            seen.append(outputs["logits"].sum())

    def after(module: LightningModule, logits: Tensor, loss: Tensor) -> Any:
        return {"loss": loss, "logits": logits}

    module = Watching(after)
    twin = copy.deepcopy(module)
    fitted(twin, make_trainer)
    ours = plugin()
    fitted(module, make_trainer, ours)
    torch.testing.assert_close(torch.stack(seen[6:]), torch.stack(seen[:6]), rtol=1e-4, atol=1e-4)
    assert "holds them after the step" in ours.report.refused("loss")["model.head"]


@pytest.mark.medium
def test_on_two_ranks_averaged_gradients_are_those_of_plain_runs(tmp_path: Path) -> None:
    """Under DistributedDataParallel; with tied weights, and where it looks for unused parameters in its output."""
    run_script(SUPPORT / "loss_ranks.py", tmp_path)


def test_sharded_over_processes_it_is_not_there_and_says_why() -> None:
    model, host = LanguageModel(), Host.detect("cpu")
    loss = technique.Loss("auto", BuildContext(model, host, torch.device("cpu"), verify=True, settings={}))
    loss.run.on_by_default = True
    engine = Engine(model, host, [loss], is_sharded=True)
    assert "a head's weight is whole only while the head is called" in engine.report.of("loss").status
    assert "forward" not in vars(model.head)
    engine.undo()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_numbers_are_within_the_spread_and_logits_never_there(dtype: torch.dtype) -> None:
    vocabulary, width, tokens = on_gpu(32768, simulated=4096), on_gpu(256, simulated=64), on_gpu(16384, simulated=4096)
    torch.manual_seed(0)
    head = nn.Linear(width, vocabulary, bias=False, device="cuda")
    rows = torch.randn(tokens, width, device="cuda", requires_grad=True)
    target = torch.randint(vocabulary, (tokens,), device="cuda")
    target[::7] = -100

    def step(handle: Any) -> tuple[list[Tensor], int]:
        rows.grad = head.weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32), handle.step():
            loss = F.cross_entropy(head(rows), target)
        (1024 * loss).backward()  # type: ignore[no-untyped-call]
        assert rows.grad is not None
        assert head.weight.grad is not None
        peak = torch.cuda.max_memory_allocated() - before
        return [loss.detach(), rows.grad, head.weight.grad], peak

    plainly = start(nn.Sequential(head), loss="off")
    expected, plain_peak = step(plainly)
    plainly.undo()
    handle = start(nn.Sequential(head), loss="on")
    for _ in range(2):
        step(handle)
    assert handle.report.applied("loss"), handle.report.to_text()
    found, peak = step(handle)
    handle.undo()
    for got, want in zip(found, expected, strict=True):
        assert deviation([got], [want]).noise < (1e-3 if dtype == torch.float32 else 2e-2)
    returned = rows.nbytes + head.weight.nbytes
    assert peak - returned < (plain_peak - returned) / 4
