"""One table of settings, one set of promises: what holds for every technique, and for all of them together.

The table follows from what the techniques declare: support/technique_table.py.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_accel.core import trial
from lightning_accel.memory import eight_bits
from lightning_accel.techniques import compiled_blocks
from support.models import TASKS, Task, TinyCNN
from support.technique_table import Loop, model_for, start, structure, table

SETTINGS = table()

# Rows whose technique may find nothing to do: no layout in a transformer, a slower one taken back.
NOTHING_TO_DO = {
    ("allocator=auto", False),
    ("allocator=auto", True),
    ("channels_last", False),
    ("memory_format=auto", False),
    ("memory_format=auto", True),
    ("inplace_activations=auto", False),
    ("flash_attention=sdpa", True),
    ("flash_attention=flash", True),
    ("flash_attention=auto", True),
    ("flash_attention=auto", False),
    ("loss=auto", True),  # no vocabulary is large enough
    ("loss=auto", False),
}

pytestmark = [
    pytest.mark.numbers,
    pytest.mark.filterwarnings("ignore:memory_format was asked for and found no site"),
    pytest.mark.filterwarnings("ignore:flash_attention was asked for and found no site"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

every_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
# The rows that only join what other rows have: their numbers are checked with everybody's, how they come and go in
# `make test-slow`.
JOINED = (
    "precision=auto",
    "flash_attention=auto",
    "flash_attention=flash",
    "all in bfloat16",
    "all in float16",
    "all that saves memory",
    "all, unverified",
)


def rows(*slow: str) -> pytest.MarkDecorator:
    """Every row of the table, those named only in `make test-slow`."""
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=[pytest.mark.slow] if name in slow else []) for name in SETTINGS]
    )


every_setting = rows("all, compiled", "precision=auto", "flash_attention=flash")
every_technique = rows("all, compiled", *JOINED)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Captures, and runs the graph as it is (test_compilation.py compiles for real); times once."""

    def compile_call(module: nn.Module, options: dict[str, Any], *_: Any) -> None:
        module._compiled_call_impl = torch.compile(
            lambda *args, **kwargs: module._call_impl(*args, **kwargs), backend="eager"
        )

    monkeypatch.setattr(compiled_blocks, "compile_call", compile_call)
    monkeypatch.setattr(trial, "MIN_PAIRS", 1)
    monkeypatch.setattr(trial, "MAX_PAIRS", 1)
    monkeypatch.setattr(eight_bits, "BLOCK", 64)  # the models are so small that no weight of theirs would be packed
    monkeypatch.setattr(eight_bits, "LEAST_ELEMENTS", 64)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@every_task
@every_setting
def test_training_gives_the_plain_loops_losses(task: Task, name: str) -> None:
    settings, technique, tolerance = SETTINGS[name]
    plain = model_for(task, SETTINGS[name])
    model = copy.deepcopy(plain)
    handle = start(model, SETTINGS[name])
    losses = Loop(model, task, handle).run(range(5))
    assert losses == pytest.approx(Loop(plain, task).run(range(5)), rel=max(tolerance, 1e-12))
    if settings and (name, isinstance(plain, TinyCNN)) not in NOTHING_TO_DO:
        assert handle.report.of(technique).is_on, handle.report.to_text()
    handle.undo()


@every_task
@every_technique
def test_undone_it_is_the_model_that_was_passed_in(task: Task, name: str) -> None:
    model = model_for(task, SETTINGS[name])
    Loop(model, task).run(range(1))
    before = structure(model)
    handle = start(model, SETTINGS[name])
    Loop(model, task, handle).run(range(3))
    handle.undo()
    assert structure(model) == before
    plain = copy.deepcopy(model)
    assert Loop(model, task).run(range(3)) == Loop(plain, task).run(range(3))


@every_task
@every_setting
def test_state_dict_does_not_notice(task: Task, name: str) -> None:
    model = model_for(task, SETTINGS[name])
    before = copy.deepcopy(model.state_dict())
    handle = start(model, SETTINGS[name])

    def assert_same() -> None:
        now = model.state_dict()
        assert list(now) == list(before)
        for key, value in now.items():
            assert (value.shape, value.dtype) == (before[key].shape, before[key].dtype)
            assert torch.equal(value, before[key])

    assert_same()
    Loop(model, task, handle).run(range(3))
    fresh = task.model(seed=7)
    fresh.load_state_dict(model.state_dict())
    model.load_state_dict(before)
    assert_same()
    handle.undo()
    assert_same()


@every_task
@every_technique
def test_a_copy_made_in_the_middle_of_a_run_is_independent(task: Task, name: str) -> None:
    """As EMA and SWA make it: the copy's forward must use the copy's weights, and train on its own."""
    model = model_for(task, SETTINGS[name])
    handle = start(model, SETTINGS[name])
    loop = Loop(model, task, handle)
    loop.run(range(3))
    twin = copy.deepcopy(model)
    inputs = task.batch()[0]
    with torch.no_grad():
        torch.manual_seed(0)
        expected = model(inputs)
        for parameter in model.parameters():
            parameter.zero_()
        torch.manual_seed(0)
        torch.testing.assert_close(twin(inputs), expected, rtol=1e-4, atol=1e-4)
    handle.undo()
    losses = Loop(twin, task).run(range(3))
    assert losses[-1] > 0.1
    assert all(parameter.grad is not None for parameter in twin.parameters())
    assert not any(parameter.any() for parameter in model.parameters())
    for module in twin.modules():
        bound = vars(module).get("forward")
        assert bound is None or bound.__self__ is module


@every_task
@every_technique
def test_pickled_in_the_middle_of_a_run_it_is_a_plain_model(task: Task, name: str) -> None:
    model = model_for(task, SETTINGS[name])
    handle = start(model, SETTINGS[name])
    Loop(model, task, handle).run(range(3))
    twin = pickle.loads(pickle.dumps(model))
    handle.undo()
    assert Loop(twin, task).run(range(3)) == pytest.approx(Loop(model, task).run(range(3)), rel=1e-5)


@every_task
@every_technique
@pytest.mark.filterwarnings("ignore:.* was asked for and found no site. already:lightning_accel.AccelWarning")
def test_applied_twice_is_applied_once(task: Task, name: str) -> None:
    plain = model_for(task, SETTINGS[name])
    before = structure(plain)
    model = copy.deepcopy(plain)
    once, twice = start(plain, SETTINGS[name]), start(model, SETTINGS[name])
    again = start(model, SETTINGS[name])  # finds its work done
    losses = Loop(model, task, twice).run(range(4))
    assert losses == pytest.approx(Loop(plain, task, once).run(range(4)), rel=1e-4)
    again.undo()
    twice.undo()
    once.undo()
    assert structure(plain)["attributes"].keys() == before["attributes"].keys()
    assert not any("forward" in vars(m) or m._compiled_call_impl for m in model.modules())
    assert all(p.stride() == q.stride() for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@every_task
@every_technique
def test_an_exception_in_the_middle_of_a_step_restores_everything(task: Task, name: str) -> None:
    model = model_for(task, SETTINGS[name])
    Loop(model, task).run(range(1))
    before = structure(model)
    handle = start(model, SETTINGS[name])
    loop = Loop(model, task, handle)

    def crash() -> None:
        with handle.step():
            model(handle.batch(task.batch()[0]))
            raise KeyError("user's bug")

    for index in range(3):
        with pytest.raises(KeyError, match="user's bug"):
            crash()
        loop.step(index)  # the run can go on
    handle.undo()
    assert structure(model) == before


@every_task
@every_technique
def test_undone_in_the_middle_it_can_be_applied_again(task: Task, name: str) -> None:
    tolerance = SETTINGS[name][2]
    plain = model_for(task, SETTINGS[name])
    model = copy.deepcopy(plain)
    handle = start(model, SETTINGS[name])
    loop = Loop(model, task, handle)
    losses = loop.run(range(2))
    handle.undo()
    loop.handle = None
    losses += loop.run(range(2, 4))
    loop.handle = start(model, SETTINGS[name])
    losses += loop.run(range(4, 6))
    loop.handle.undo()
    assert losses == pytest.approx(Loop(plain, task).run(range(6)), rel=max(tolerance, 1e-6), abs=1e-6)


@every_task
@every_setting
def test_evaluation_between_steps_gives_what_the_plain_model_gives(task: Task, name: str) -> None:
    model = model_for(task, SETTINGS[name])
    handle = start(model, SETTINGS[name])
    loop = Loop(model, task, handle)
    inputs = task.batch(9)[0]
    for index in range(3):
        loop.step(index)
        plain = pickle.loads(pickle.dumps(model)).eval()
        model.eval()
        with torch.inference_mode() if index % 2 else torch.no_grad():
            with handle.step("validate"):
                outputs = model(handle.batch(inputs)).float()
            expected = plain(inputs)
        model.train()
        torch.testing.assert_close(outputs, expected, rtol=0.05, atol=0.05)
    handle.undo()


@every_task
@every_technique
def test_the_report_has_a_reason_for_every_site(task: Task, name: str) -> None:
    model = model_for(task, SETTINGS[name])
    handle = start(model, SETTINGS[name])
    Loop(model, task, handle).run(range(3))
    for technique, record in handle.report.techniques.items():
        assert record.status
        sites = [site for site in handle.report.applied(technique) if not site.startswith("optimizer ")]
        assert all(model.get_submodule(site) is not None for site in sites)
        assert all(handle.report.refused(technique).values())
        assert not {*handle.report.applied(technique)} & {*handle.report.refused(technique)}
    handle.undo()
