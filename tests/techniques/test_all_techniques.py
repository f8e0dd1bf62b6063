"""One table of settings, one set of promises: what holds for every technique, and for all of them together.

The table follows from what the techniques declare: support/technique_table.py.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch

from lightning_accel.techniques.arms import OFF
from support.models import Task, grow
from support.technique_table import (
    NOTHING_TO_DO,
    Loop,
    acts,
    comes_and_goes,
    make_small_models_do,
    model_for,
    start,
    structure,
    table,
    tasks_of,
)

SETTINGS = table()

pytestmark = [
    pytest.mark.numbers,
    pytest.mark.filterwarnings("ignore:memory_format was asked for and found no site"),
    pytest.mark.filterwarnings("ignore:flash_attention was asked for and found no site"),
    pytest.mark.filterwarnings("ignore:flash_attention. the CPU's flash kernel has no dropout"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Calling register_constant:DeprecationWarning"),  # torchao, once
]
# -- which rows ------------------------------------------------------------------------------------------------------

PAIRS = {(name, task): one for name, row in SETTINGS.items() for task, one in tasks_of(name, row).items()}
ACTING = [pair for pair in PAIRS if pair not in NOTHING_TO_DO]


def rows(pairs: Iterable[tuple[str, str]], is_slow: Callable[[str, str], bool]) -> pytest.MarkDecorator:
    """Rows with tasks, some of them only in `make test-slow`."""
    params = [
        pytest.param(
            name, PAIRS[name, task], id=f"{name}-{task}", marks=[pytest.mark.slow] if is_slow(name, task) else []
        )
        for name, task in pairs
    ]
    return pytest.mark.parametrize(("name", "task"), params)


every_setting = rows(ACTING, lambda name, task: name in ("all, compiled", "flash_attention=flash"))
# Those that edit modules, steps or saved tensors, each in its own way: what is promised of the middle of a run.
EDITING = (
    *("precision=16-mixed", "loss=auto", "optimizer=auto", "sparse_activations=auto", "compile=on"),
    "all in float32",  # attention, activations in place and checkpointing
)
every_edit = rows(ACTING, lambda name, task: name not in EDITING or not comes_and_goes(name, SETTINGS[name], task))
# One setting of a technique, or a few where another one is other code.
every_technique = rows(ACTING, lambda name, task: not comes_and_goes(name, SETTINGS[name], task))


@pytest.fixture(autouse=True)
def _quick(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, determinism_restored: None
) -> Iterator[None]:
    row = SETTINGS[request.node.callspec.params["name"]]
    if "float8" in row.settings or "optimizer_8bit" in row.settings:
        pytest.importorskip("torchao")
    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_small_models_do(row, monkeypatch)
        yield
    torch._dynamo.reset()


# -- what it does ----------------------------------------------------------------------------------------------------


@every_setting
def test_it_acts_and_training_gives_the_plain_loops_losses_and_draws(name: str, task: Task) -> None:
    row = SETTINGS[name]
    plain = model_for(task, row)
    model = copy.deepcopy(plain)
    handle = start(model, row)
    loop, plain_loop = Loop(model, task, handle), Loop(plain, task)
    assert loop.run(range(5)) == pytest.approx(plain_loop.run(range(5)), rel=max(row.tolerance, 1e-12))
    assert all(map(torch.equal, loop.streams, plain_loop.streams))
    assert acts(handle, row.technique, task) == bool(row.settings), handle.report.to_text()
    handle.undo()


@rows(NOTHING_TO_DO, lambda name, task: False)
def test_where_there_is_nothing_to_do_the_run_is_the_plain_one(name: str, task: Task) -> None:
    row = SETTINGS[name]
    plain = model_for(task, row)
    model = copy.deepcopy(plain)
    handle = start(model, row)
    assert Loop(model, task, handle).run(range(4)) == Loop(plain, task).run(range(4))
    assert not acts(handle, row.technique, task)
    handle.undo()


@every_technique
def test_undone_it_is_the_model_that_was_passed_in(name: str, task: Task) -> None:
    model = model_for(task, SETTINGS[name])
    Loop(model, task).run(range(1))
    before = structure(model)
    handle = start(model, SETTINGS[name])
    Loop(model, task, handle).run(range(3))
    handle.undo()
    assert structure(model) == before
    plain = copy.deepcopy(model)
    assert Loop(model, task).run(range(3)) == Loop(plain, task).run(range(3))


@every_technique
def test_state_dict_does_not_notice(name: str, task: Task) -> None:
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


@every_edit
def test_a_copy_made_in_the_middle_of_a_run_is_independent(name: str, task: Task) -> None:
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


@every_edit
def test_pickled_in_the_middle_of_a_run_it_is_a_plain_model(name: str, task: Task) -> None:
    model = model_for(task, SETTINGS[name])
    handle = start(model, SETTINGS[name])
    Loop(model, task, handle).run(range(3))
    twin = pickle.loads(pickle.dumps(model))
    handle.undo()
    assert Loop(twin, task).run(range(3)) == pytest.approx(Loop(model, task).run(range(3)), rel=1e-5)


@every_technique
@pytest.mark.filterwarnings("ignore:.* was asked for and found no site:lightning_accel.AccelWarning")
def test_applied_twice_is_applied_once(name: str, task: Task) -> None:
    plain = model_for(task, SETTINGS[name])
    before = structure(plain)
    model = copy.deepcopy(plain)
    once, twice = start(plain, SETTINGS[name]), start(model, SETTINGS[name])
    again = start(model, SETTINGS[name])  # finds its work done
    losses = Loop(model, task, twice).run(range(3))
    assert losses == pytest.approx(Loop(plain, task, once).run(range(3)), rel=1e-4)
    again.undo()
    twice.undo()
    once.undo()
    assert structure(plain)["attributes"].keys() == before["attributes"].keys()
    assert not any("forward" in vars(m) or m._compiled_call_impl for m in model.modules())
    assert all(p.stride() == q.stride() for p, q in zip(model.parameters(), plain.parameters(), strict=True))


@every_edit
def test_an_exception_in_the_middle_of_a_step_restores_everything(name: str, task: Task) -> None:
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


@every_edit
def test_undone_in_the_middle_it_can_be_applied_again(name: str, task: Task) -> None:
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


SWITCHED = {name: task for name, task in reversed(ACTING) if name.endswith("=auto")}  # each with the first of its tasks
# The last one has kernels timed, which a run without live trials does not.
WITHOUT_ARMS = ("inplace_activations=auto", "sparse_activations=auto", "padding=auto", "cudnn_benchmark=auto")


@rows([pair for pair in SWITCHED.items() if pair[0] not in WITHOUT_ARMS], lambda name, task: False)
def test_switched_between_steps_as_live_trials_do_it_trains_as_plainly(name: str, task: Task) -> None:
    row = SETTINGS[name]
    plain = model_for(task, row)
    model = copy.deepcopy(plain)
    handle = start(model, row, trust="checked")
    loop = Loop(model, task, handle)
    losses = loop.run(range(4))
    (arm,) = [arm for arm in handle.engine.arms() if arm.name == row.technique]
    if arm.setup is not None:
        arm.setup.begin(may_take_s=60.0)
        losses.append(loop.step(len(losses)))
        assert arm.setup.end() is not None, handle.report.to_text()
    for choice in (*arm.choices, OFF, *arm.choices):
        arm.choose(choice)
        handle.engine.disable([arm.name] if choice == OFF else [])
        losses.append(loop.step(len(losses)))
    assert losses == pytest.approx(Loop(plain, task).run(range(len(losses))), rel=max(row.tolerance, 1e-6))
    handle.undo()


@every_edit
def test_a_layer_and_a_bias_added_in_mid_run_train_as_plainly(name: str, task: Task) -> None:
    row = SETTINGS[name]
    plain = model_for(task, row)
    model = copy.deepcopy(plain)
    handle = start(model, row)
    loops = Loop(model, task, handle), Loop(plain, task)
    losses: list[list[float]] = [[], []]
    for loop, found in zip(loops, losses, strict=True):
        found += loop.run(range(3))
        loop.optimizer.add_param_group({"params": (grown := grow(loop.model))})
        found += loop.run(range(3, 7))
        assert all(parameter.grad is not None for parameter in grown)
    assert losses[0] == pytest.approx(losses[1], rel=max(4 * row.tolerance, 1e-6))  # of more steps than elsewhere
    handle.undo()


@every_edit
def test_evaluation_between_steps_gives_what_the_plain_model_gives(name: str, task: Task) -> None:
    model = model_for(task, SETTINGS[name])
    handle = start(model, SETTINGS[name])
    loop = Loop(model, task, handle)
    inputs = task.batch(9)[0]
    for index in range(2):
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


@every_technique
def test_the_report_has_a_reason_for_every_site(name: str, task: Task) -> None:
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
