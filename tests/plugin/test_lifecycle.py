"""The module is the user's own again after every kind of run, however it ended."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_accel import AccelPlugin
from lightning_accel.experiment.trial import Trial
from lightning_accel.settings import Plan
from support.lightning_models import Block, Call, Supervised, Transformer, cnn, footprint, images, tokens

MakeTrainer = Callable[..., Any]


BLOCKS = {"mode": "full", "blocks": ["net.0", "net.3"]}


def everything(**settings: Any) -> AccelPlugin:
    """Acts on a CNN in every way that does not depend on a clock."""
    given = {
        "precision": "32-true",
        "memory_format": "channels_last",
        "gradient_checkpointing": BLOCKS,
    }
    return AccelPlugin.from_plan(Plan().replace(**{**given, **settings}))


# -- the module is given back -------------------------------------------------------------------------------------


def test_the_run_does_change_the_module(make_trainer: MakeTrainer) -> None:
    """Without this the tests below would pass on a plugin that does nothing."""
    module, seen = Supervised(cnn()), {}
    before = footprint(module)
    look = Call(on_train_batch_end=lambda *_: seen.update(footprint(module)))
    plugin = everything()
    make_trainer(plugins=[plugin], callbacks=[look]).fit(module, images())
    assert {name for name in before if seen[name] != before[name]} >= {"net.0", "net.3"}
    assert plugin.report.applied("gradient_checkpointing") == ["net.0", "net.3"]
    assert plugin.report.applied("memory_format") == ["net.0", "net.3"]


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_the_module_is_as_before_after(make_trainer: MakeTrainer, stage: str) -> None:
    module = Supervised(cnn())
    before = footprint(module)
    getattr(make_trainer(plugins=[everything()]), stage)(module, images())
    assert footprint(module) == before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("hook", ["training_step", "validation_step", "callback", "configure_optimizers", "backward"])
def test_the_module_is_as_before_after_an_exception(
    make_trainer: MakeTrainer, hook: str, error: type[BaseException]
) -> None:
    steps = 0

    class Fails(Supervised):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            nonlocal steps
            loss = super().training_step(batch, batch_idx)
            steps += 1
            if hook == "training_step" and steps >= 3:
                raise error("in the middle")
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if hook == "validation_step" and steps == 4:
                raise error("in the middle")

        def backward(self, *args: Any, **kwargs: Any) -> None:
            if hook == "backward":
                raise error("in the middle")
            super().backward(*args, **kwargs)

        def configure_optimizers(self) -> Any:
            if hook == "configure_optimizers":
                raise error("in the middle")
            return super().configure_optimizers()

    def fail(*_: Any) -> None:
        if hook == "callback":
            raise error("in the middle")

    module = Fails(cnn())
    before = footprint(module)
    trainer = make_trainer(plugins=[everything()], callbacks=[Call(on_train_batch_end=fail)])
    with pytest.raises((error, SystemExit)):
        trainer.fit(module, images(), images())
    assert footprint(module) == before


def test_an_exception_in_the_very_first_trial_step_leaves_the_module_as_before(make_trainer: MakeTrainer) -> None:
    class Fails(Supervised):
        def loss(self, batch: Any) -> Tensor:
            super().loss(batch)
            raise RuntimeError("in the middle")

    module = Fails(cnn())
    before = footprint(module)
    with pytest.raises(RuntimeError, match="in the middle"):
        make_trainer(plugins=[everything()]).fit(module, images())
    assert footprint(module) == before


def test_the_strategy_is_given_back_too(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(plugins=[everything()])
    trainer.fit(Supervised(cnn()), images())
    assert "batch_to_device" not in vars(trainer.strategy)


# -- one run after another ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", ["same trainer", "same plugin", "new plugin"])
def test_a_second_fit_on_the_same_module(make_trainer: MakeTrainer, again: str) -> None:
    module, plugin = Supervised(cnn()), everything()
    before = footprint(module)
    trainer = make_trainer(plugins=[plugin])
    trainer.fit(module, images())
    if again == "same trainer":
        trainer.fit_loop.max_epochs = 2
    else:
        plugin = plugin if again == "same plugin" else everything()
        trainer = make_trainer(plugins=[plugin])
    trainer.fit(module, images())
    assert len(module.losses) == 8
    assert plugin.report.applied("gradient_checkpointing") == ["net.0", "net.3"]
    assert footprint(module) == before


def trials(monkeypatch: pytest.MonkeyPatch) -> list[Trial]:
    """Every trial from now on."""
    seen: list[Trial] = []
    numbers = Trial.numbers

    def noted(self: Trial, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return numbers(self, *args, **kwargs)

    monkeypatch.setattr(Trial, "numbers", noted)
    return seen


def test_a_second_fit_decides_as_the_first_without_another_trial(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, plugin, seen = CountsCalls(cnn()), everything(), trials(monkeypatch)
    make_trainer(plugins=[plugin]).fit(module, images())
    assert seen
    assert module.calls == 4, "no trial calls what the user wrote"
    seen.clear()
    make_trainer(plugins=[plugin]).fit(module, images())
    assert not seen


def test_another_module_is_tried_anew(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin, seen = everything(), trials(monkeypatch)
    make_trainer(plugins=[plugin]).fit(CountsCalls(cnn()), images())
    seen.clear()
    make_trainer(plugins=[plugin]).fit(CountsCalls(cnn()), images())
    assert seen


class CountsCalls(Supervised):
    """Counts the calls of its first convolution, in a cell that no trial can restore."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self._calls = Cell()
        net[0].register_forward_hook(lambda *_: self._calls.add())  # type: ignore[index]

    @property
    def calls(self) -> int:
        return self._calls.value

    @calls.setter
    def calls(self, value: int) -> None:
        self._calls.value = value


class Cell:
    value = 0

    def add(self) -> None:
        self.value += 1


@pytest.mark.filterwarnings("ignore:gradient_checkpointing was asked for and is not in force")
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_run_without_gradients_does_not_decide_for_training(make_trainer: MakeTrainer, stage: str) -> None:
    """A block that must not be recomputed is only found out with gradients."""
    module = Supervised(Remembering())
    plugin = everything(gradient_checkpointing={"mode": "full", "blocks": ["net.0"]}, memory_format="off")
    getattr(make_trainer(plugins=[plugin]), stage)(module, images())
    make_trainer(plugins=[plugin]).fit(module, images())
    assert "net.0" in plugin.report.refused("gradient_checkpointing")


class Remembering(nn.Sequential):
    def __init__(self) -> None:
        class Counts(nn.Conv2d):
            def forward(self, x: Tensor) -> Tensor:
                self.seen = getattr(self, "seen", 0) + 1
                return super().forward(x)

        super().__init__(Counts(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 4))


def test_fit_validate_test_predict_with_one_trainer(make_trainer: MakeTrainer) -> None:
    module = Supervised(cnn())
    before = footprint(module)
    trainer = make_trainer(plugins=[everything(precision="bf16-mixed")])
    trainer.fit(module, images(), images())
    trainer.validate(module, images())
    trainer.test(module, images())
    predictions = trainer.predict(module, images())
    assert len(predictions) == 4
    after = footprint(module)
    assert {k: v for k, v in after.items() if k.startswith("net.0")} == {
        k: v for k, v in before.items() if k.startswith("net.0")
    }


@pytest.mark.parametrize(
    ("stage", "inference_mode", "memory_format"),
    [("validate", True, "channels_last"), ("predict", False, "channels_last"), ("predict", True, "auto")],
)
def test_a_module_that_was_only_evaluated_can_still_be_trained(
    make_trainer: MakeTrainer, stage: str, inference_mode: bool, memory_format: Any
) -> None:
    module = Supervised(cnn())
    plugin = everything(memory_format=memory_format)
    getattr(make_trainer(plugins=[plugin], inference_mode=inference_mode), stage)(module, images())
    assert not any(p.is_inference() for p in (*module.parameters(), *module.buffers()))
    make_trainer(plugins=[plugin]).fit(module, images())
    assert len(module.losses) == 4


# -- copies of the plugin -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "precision", ["auto", "16-mixed", *(pytest.param(one, marks=pytest.mark.slow) for one in ("32-true", "bf16-mixed"))]
)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
@pytest.mark.parametrize("after_run", [False, True], ids=["before a run", "after a run"])
def test_a_copied_plugin_trains(make_trainer: MakeTrainer, precision: Any, duplicate: Any, after_run: bool) -> None:
    plugin = AccelPlugin(precision=precision, techniques={"memory_format": "channels_last"})
    if after_run:
        make_trainer(plugins=[plugin]).fit(Supervised(cnn()), images())
    twin = duplicate(plugin)
    module = Supervised(cnn())
    make_trainer(plugins=[twin]).fit(module, images())
    assert len(module.losses) == 4
    assert twin.plan == plugin.plan


@pytest.mark.parametrize("precision", ["auto", "32-true", "bf16-mixed"])
def test_a_subclass_stays_what_it_is(make_trainer: MakeTrainer, precision: Any) -> None:
    class Mine(AccelPlugin):
        pass

    plugin = Mine(precision=precision)
    make_trainer(plugins=[plugin]).fit(Supervised(cnn()), images())
    assert type(plugin) is Mine
    assert plugin.__class__.__qualname__ == Mine.__qualname__  # the key of its state in checkpoints


def test_the_representation_names_the_precision_and_what_is_not_default() -> None:
    plugin = AccelPlugin(precision="bf16-mixed", compile="auto")
    assert repr(plugin) == "AccelPlugin(precision='bf16-mixed', compile='auto')"


def test_a_dropped_module_is_not_kept_alive(make_trainer: MakeTrainer) -> None:
    import gc
    import weakref

    plugin = everything()

    def run() -> weakref.ref[LightningModule]:
        module = Supervised(cnn())
        make_trainer(plugins=[plugin]).fit(module, images())
        return weakref.ref(module)

    reference = run()
    gc.collect()
    assert reference() is None


def test_blocks_of_a_transformer_are_given_back(make_trainer: MakeTrainer) -> None:
    module = Supervised(Transformer())
    before = footprint(module)
    plugin = AccelPlugin(precision="bf16-mixed", memory={"checkpoint": "selective"})
    make_trainer(plugins=[plugin]).fit(module, tokens())
    assert footprint(module) == before
    assert all(type(block) is Block for block in module.net.blocks)
