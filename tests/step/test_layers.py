"""Layers stand around the methods of a step in one order, whichever came first, and leave no trace."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from lightning_accel.step.layers import ORDER, Call, Layer, StepPipeline

ROOT = Path(__file__).parents[2]


class Strategy:
    """Has the methods of a step."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def training_step(self, batch: int) -> int:
        self.calls.append("user")
        return batch + 1

    def backward(self, loss: int) -> None:
        self.calls.append("backward")


class Noting(Layer):
    """Notes when it is called."""

    def __init__(self, name: str, strategy: Strategy, methods: tuple[str, ...] = ("training_step",)) -> None:
        self.name = name  # type: ignore[misc]  # on the class, for the package's own
        super().__init__([(strategy, methods)])
        self._strategy = strategy

    @override
    def around(self, stage: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        self._strategy.calls.append(self.name)
        return call(*args, **kwargs)


@pytest.mark.parametrize("names", [ORDER, ORDER[::-1]], ids=["outermost first", "innermost first"])
def test_layers_are_called_in_their_order_whichever_came_first(names: tuple[str, ...]) -> None:
    strategy = Strategy()
    StepPipeline(Noting(name, strategy) for name in names)
    assert strategy.training_step(1) == 2
    assert strategy.calls == [*ORDER, "user"]


def test_a_method_is_patched_once_however_many_layers_it_has() -> None:
    strategy = Strategy()
    StepPipeline([Noting("retry", strategy)])
    patched = strategy.training_step
    StepPipeline([Noting("timeline", strategy), Noting("split", strategy)])
    assert strategy.training_step == patched
    assert not hasattr(patched.__wrapped__, "__wrapped__")  # type: ignore[attr-defined]


def test_without_layers_the_method_is_the_objects_own() -> None:
    strategy = Strategy()
    pipeline = StepPipeline([Noting("retry", strategy), Noting("split", strategy, ("training_step", "backward"))])
    pipeline.clear()
    assert vars(strategy).keys() == {"calls"}


def test_a_disabled_pipeline_is_not_called_until_it_is_enabled_again() -> None:
    strategy = Strategy()
    companion = Noting("timeline", strategy)
    pipeline = StepPipeline([layer := Noting("retry", strategy), Noting("split", strategy)])
    layer.companions.add(companion)
    pipeline.enable(False)
    strategy.training_step(1)
    assert strategy.calls == ["user"]
    pipeline.enable(True)
    strategy.training_step(1)
    assert strategy.calls == ["user", "timeline", "retry", "split", "user"]


def test_a_layer_keeps_its_place_though_it_came_while_others_were_disabled() -> None:
    strategy = Strategy()
    pipeline = StepPipeline([Noting("retry", strategy)])
    pipeline.enable(False)
    StepPipeline([Noting("timeline", strategy), Noting("split", strategy)])
    pipeline.enable(True)
    strategy.training_step(1)
    assert strategy.calls == ["timeline", "retry", "split", "user"]


def test_a_deep_copy_of_the_object_has_no_layers() -> None:
    strategy = Strategy()
    StepPipeline([Noting("retry", strategy)])
    other = copy.deepcopy(strategy)
    other.calls = []
    assert other.training_step(1) == 2
    assert (other.calls, strategy.calls) == (["user"], [])


def test_layers_that_end_in_another_order_than_they_began_leave_nothing_behind() -> None:
    strategy = Strategy()
    first, second = Noting("timeline", strategy), Noting("timeline", strategy)
    for layer in (first, second):
        layer.apply()
    first.undo()
    strategy.training_step(1)
    assert strategy.calls == ["timeline", "user"]
    second.undo()
    assert "training_step" not in vars(strategy)


def test_layers_join_below_what_somebody_else_has_wrapped_around_the_method() -> None:
    strategy = Strategy()
    StepPipeline([Noting("split", strategy)])
    ours = strategy.training_step

    def theirs(batch: int) -> int:
        strategy.calls.append("theirs")
        return ours(batch)

    strategy.training_step = theirs  # type: ignore[method-assign]
    late = StepPipeline([Noting("retry", strategy)])
    strategy.training_step(1)
    assert strategy.calls == ["retry", "theirs", "split", "user"]
    late.clear()
    assert strategy.training_step is theirs


def test_a_pipeline_reads_as_its_layers_from_the_outside_in() -> None:
    strategy = Strategy()
    pipeline = StepPipeline([Noting("split", strategy), Noting("oom_report", strategy)])
    assert repr(pipeline) == "oom_report → split → Lightning"
    pipeline.enable(False)
    assert repr(pipeline) == "(oom_report, disabled) → (split, disabled) → Lightning"


def test_a_method_that_is_none_is_named() -> None:
    with pytest.raises(TypeError, match=r"Strategy\.calls is no method"):
        StepPipeline([Noting("retry", Strategy(), ("calls",))])


def test_contributing_draws_the_order() -> None:
    drawn = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    step = drawn.partition("strategy.training_step(batch)\n")[2].partition("    Lightning's own")[0]
    assert tuple(line.split()[0] for line in step.splitlines()) == ORDER
    files = [line.split()[1] for line in step.splitlines()]
    assert all((ROOT / file).exists() or (ROOT / "lightning_accel" / file).exists() for file in files)
