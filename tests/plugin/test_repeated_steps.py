"""A step that runs once more, as the user wrote it, finds what the first found: gradients, buffers, random numbers."""

from __future__ import annotations

import random
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import SumMetric

from lightning_accel import AccelPlugin
from lightning_accel.core.report import AccelWarning
from lightning_accel.lightning.step_snapshot import SmallState

pytestmark = pytest.mark.numbers


class RaisesEdited(LightningModule):
    """Raises in its sixth step exactly as long as a module of its is edited."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))

    def raise_if_edited(self, batch_idx: int) -> None:
        if batch_idx == 5 and any("forward" in vars(module) for module in self.net.modules()):
            raise RuntimeError("only an edit raises this")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        self.raise_if_edited(batch_idx)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.fixture
def run(make_trainer: Callable[..., Trainer]) -> Callable[..., Trainer]:
    def fit(model: LightningModule, plugin: AccelPlugin | None = None) -> Trainer:
        trainer = make_trainer(plugins=[plugin] if plugin else [])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AccelWarning)
            trainer.fit(model, DataLoader(TensorDataset(torch.ones(32, 8)), batch_size=4))
        return trainer

    return fit


class Counts(RaisesEdited):
    """Counts its steps in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("assigned", torch.zeros(()))
        self.register_buffer("written", torch.zeros(()))
        self.metric = SumMetric()
        self.steps, self.drawn = 0, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("logged", 1.0, on_step=False, on_epoch=True, reduce_fx="sum")
        self.metric.update(1.0)
        self.assigned = self.assigned + 1
        self.written += 1
        self.steps += 1
        self.drawn = random.random()
        return super().training_step(batch, batch_idx)

    def counted(self, trainer: Trainer) -> list[float]:
        logged = trainer.callback_metrics["logged"]
        counts = (logged, self.metric.compute(), self.assigned, self.written, self.steps, self.drawn)
        return [float(count) for count in counts]


def test_what_a_repeated_step_counted_is_counted_once(run: Callable[..., Trainer]) -> None:
    counted = []
    for plugin in (None, AccelPlugin(report=False)):
        random.seed(1)
        model = Counts()
        counted.append(model.counted(run(model, plugin)))
    assert counted[0][:-1] == [8] * 5
    assert counted[1] == counted[0]


class DrawsItsOwn(RaisesEdited):
    """Adds noise from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.torchs = torch.Generator().manual_seed(1)
        self.pythons = random.Random(1)
        self.numpys = numpy.random.default_rng(1)
        self.older = numpy.random.RandomState(1)
        self.drawn: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        noise = torch.rand((), generator=self.torchs)
        drawn = [float(noise), self.pythons.random(), float(self.numpys.random()), float(self.older.random_sample())]
        loss = super().training_step(batch, batch_idx)
        self.drawn.append(drawn)
        return loss


@pytest.mark.parametrize("raises_at", [0, 5])
def test_a_repeated_step_draws_the_same_from_the_modules_own_generators(
    run: Callable[..., Trainer], raises_at: int
) -> None:
    class Draws(DrawsItsOwn):
        def raise_if_edited(self, batch_idx: int) -> None:
            super().raise_if_edited(batch_idx + 5 - raises_at)

    plain, repeated, plugin = Draws(), Draws(), AccelPlugin(report=False)
    run(plain)
    run(repeated, plugin)
    assert any("ran when it was repeated" in note for note in plugin.report.notes)
    assert repeated.drawn == plain.drawn


class DrawsFromTheProcess(RaisesEdited):
    """Draws from the streams that all code of the process shares, from a step on."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first, self.drawn = first, list[float]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        drawn = [float(torch.rand(()))]
        if self.trainer.global_step >= self.first:
            drawn += [random.random(), float(numpy.random.standard_normal())]
        self.drawn = self.drawn + drawn
        return super().training_step(batch, 5 * (self.trainer.global_step == 90))


@pytest.mark.parametrize("first", [0, 40])
def test_a_late_step_draws_the_same_from_the_streams_of_the_process(
    make_trainer: Callable[..., Trainer], first: int
) -> None:
    drawn = []
    for plugins in ([], [AccelPlugin(report=False, trust="checked")]):
        random.seed(1)
        numpy.random.seed(1)
        torch.manual_seed(1)
        model = DrawsFromTheProcess(first)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AccelWarning)
            make_trainer(max_epochs=12, plugins=plugins).fit(
                model, DataLoader(TensorDataset(torch.ones(32, 8)), batch_size=4)
            )
        drawn.append(model.drawn)
    assert any("ran when it was repeated" in note for note in plugins[0].report.notes)
    assert drawn[0] == drawn[1]


def test_most_snapshots_leave_the_streams_of_python_and_numpy_out_unless_something_draws() -> None:
    module, others = RaisesEdited(), {"random", "numpy.random"}
    state, streams = SmallState(module), []
    for _ in range(80):
        state.of_module()  # as each step of several ranks does
        streams.append(others & state.snapshot((), torch.device("cpu")).random_states.keys())
    with_others = [step for step, found in enumerate(streams) if found]
    assert with_others == [*range(8), 63, 64]
    module.eval()
    for _ in range(20):
        random.random()
        assert others <= state.snapshot((), torch.device("cpu")).random_states.keys()


LARGE = 3 << 18  # of float32: more than is copied at every step


class HoldsATable(RaisesEdited):
    """A codebook, or a queue of keys."""

    writes = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(LARGE))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.writes:
            self.write()
        return super().training_step(batch, batch_idx)

    def write(self) -> None:
        self.table[:8] += 1


class WritesUnseen(HoldsATable):
    writes = True

    def write(self) -> None:
        self.table.data[:8] += 1


class WritesAnAttribute(HoldsATable):
    writes = True

    def __init__(self) -> None:
        super().__init__()
        self.table = None
        self.plain = torch.zeros(8)

    def write(self) -> None:
        self.plain += 1


class WritesATable(HoldsATable):
    writes = True


@pytest.mark.parametrize("kind", [WritesATable, WritesUnseen, WritesAnAttribute])
def test_a_step_that_has_written_what_is_not_kept_is_not_repeated(
    run: Callable[..., Trainer], kind: type[HoldsATable]
) -> None:
    model = kind()
    with pytest.raises(RuntimeError, match="only an edit raises this"):
        run(model, AccelPlugin(report=False))
    written = model.plain if kind is WritesAnAttribute else model.table
    assert float(written[0]) == 6


def test_a_large_table_that_is_only_read_does_not_stand_in_the_way(run: Callable[..., Trainer]) -> None:
    plugin = AccelPlugin(report=False)
    run(HoldsATable(), plugin)
    assert any("ran when it was repeated" in note for note in plugin.report.notes)


@pytest.mark.parametrize("kind", ["sparse", "expanded"])
@pytest.mark.parametrize("raises_at", [0, 5])
def test_buffers_that_cannot_be_copied_do_not_stand_in_the_way(
    run: Callable[..., Trainer], kind: str, raises_at: int
) -> None:
    class Holds(RaisesEdited):
        def __init__(self) -> None:
            super().__init__()
            makes = {
                "sparse": lambda: torch.eye(8).to_sparse(),
                "expanded": lambda: torch.arange(8.0).expand(4, -1),
            }
            self.register_buffer("held", makes[kind]())

        def raise_if_edited(self, batch_idx: int) -> None:
            super().raise_if_edited(batch_idx + 5 - raises_at)

    plugin = AccelPlugin(report=False)
    run(Holds(), plugin)
    assert any("ran when it was repeated" in note for note in plugin.report.notes)


def test_a_buffer_that_goes_in_mid_run_does_not_stand_in_the_way(run: Callable[..., Trainer]) -> None:
    class LosesItsBuffer(RaisesEdited):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("start", torch.zeros(8))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 4:
                self.start = None
            return self.net(batch[0]).square().mean()

    assert run(LosesItsBuffer(), AccelPlugin(report=False)).global_step == 8


def test_lazy_norms_train(run: Callable[..., Trainer]) -> None:
    model = RaisesEdited()
    model.net = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Linear(8, 2))
    run(model, AccelPlugin(report=False))
    assert model.net[1].num_batches_tracked == 8


class GoesBackwardItself(RaisesEdited):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0]).square().mean().backward()
        self.raise_if_edited(batch_idx)


def test_a_step_that_has_gone_backward_behind_lightnings_back_is_not_repeated(run: Callable[..., Trainer]) -> None:
    with pytest.raises(RuntimeError, match="only an edit"):
        run(GoesBackwardItself(), AccelPlugin(report=False))


class TakesOneDtype(RaisesEdited):
    """Writes what a layer computed into a float32 tensor: autocast's results do not go there."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), activation, nn.Linear(8, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        results = torch.zeros(4, 2)
        results[torch.arange(4)] = self.net(batch[0])
        return results.square().mean()


@pytest.mark.parametrize("activation", [nn.Identity, nn.ReLU], ids=["nothing edited", "edited"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_precision_of_our_choice_is_taken_back(
    run: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, precision: str, activation: type[nn.Module]
) -> None:
    """What ``auto`` comes to on other machines."""
    monkeypatch.setattr(
        "lightning_accel.lightning.plugin.resolve_precision", lambda *_: (precision, "as on another machine")
    )
    models = []
    for plugin in (None, AccelPlugin(trust="unchecked", report=False)):
        torch.manual_seed(0)
        models.append(TakesOneDtype(activation()))
        run(models[-1], plugin)
    assert plugin is not None
    assert plugin.report.of("precision").status.startswith("32-true: a step raised RuntimeError")
    torch.testing.assert_close(models[1].state_dict(), models[0].state_dict())


def batches_alive(make_trainer: Callable[..., Trainer], plugins: list[AccelPlugin]) -> list[int]:
    """How many earlier batches are still in memory, each time that another one is fetched."""
    alive: list[int] = []

    class Stream(IterableDataset[list[Tensor]]):
        def __iter__(self) -> Iterator[list[Tensor]]:
            given: list[weakref.ref[Tensor]] = []
            for _ in range(5):
                alive.append(sum(batch() is not None for batch in given))
                batch = torch.ones(4, 8)
                given.append(weakref.ref(batch))
                yield [batch]
                del batch

    make_trainer(plugins=plugins).fit(RaisesEdited(), DataLoader(Stream(), batch_size=None))
    return alive


def test_no_batch_is_kept_longer_than_without(make_trainer: Callable[..., Trainer]) -> None:
    assert batches_alive(make_trainer, [AccelPlugin(report=False)]) == batches_alive(make_trainer, [])


def test_a_failed_steps_activations_are_gone_when_it_is_repeated(run: Callable[..., Trainer]) -> None:
    """A step that ran out of memory would do so again beside them."""
    failed: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    class Remembers(RaisesEdited):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            alive.extend(activation() is not None for activation in failed)
            hidden = self.net[0](batch[0])
            if batch_idx == 5 and not failed:
                failed.append(weakref.ref(hidden))
            self.raise_if_edited(batch_idx)
            return self.net[2](self.net[1](hidden)).square().mean()

    run(Remembers(), AccelPlugin(report=False))
    assert alive[0] is False
