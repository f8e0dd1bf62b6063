"""A technique is declared once, from outside the package too, and is then everywhere that a technique is."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_accel import AccelPlugin, AccelWarning, Plan, accelerate
from lightning_accel.cli.decisions import ExampleModel
from lightning_accel.core.host import Host
from lightning_accel.techniques import (
    AttributePatch,
    BuildContext,
    Options,
    Patch,
    Site,
    Technique,
    Traits,
    Variant,
    Verdict,
    register,
)
from lightning_accel.techniques.registry import declarations
from support.lightning_models import Supervised, vectors
from support.models import TASKS
from support.simulated_hosts import when_asked
from support.technique_table import Loop, model_for, start, structure, table

HOST = Host(kind="cpu", device_name="a CPU")


@dataclass(frozen=True, kw_only=True)
class GentleOptions(Options):
    """How gently dropout drops.

    Attributes:
        mode: ``"on"`` lets every dropout drop nothing at all; ``"off"``.
        spare: Modules that drop as before.
    """

    mode: Literal["off", "on"] = "off"
    spare: tuple[str, ...] = ()


class Gentle(Technique):
    """Lets dropouts drop nothing, and marks optimizers: it edits both, and has no other sense."""

    traits = Traits(edits_optimizers=True)

    def __init__(self, settings: GentleOptions) -> None:
        self.settings = settings
        self.steps = 0

    @classmethod
    def from_settings(cls, settings: GentleOptions, context: BuildContext) -> Gentle:
        return cls(settings)

    def sites(self, model: nn.Module, host: Host) -> Iterable[Patch]:
        for site, module in model.named_modules():
            if site in self.settings.spare:
                yield Site(site, why_not="left alone, as gentle.spare says")
            elif isinstance(module, nn.Dropout):
                yield AttributePatch(site, "p → 0", module, "p", 0.0)

    def optimizer_sites(self, optimizers: Mapping[str, Optimizer]) -> Iterable[Patch]:
        for site, optimizer in optimizers.items():
            mark, remove = partial(setattr, optimizer, "is_gentle", True), partial(delattr, optimizer, "is_gentle")
            yield Site(site, [Variant("marked", mark, remove)], "marked")

    def batch(self, batch: Any, stage: str) -> Any:
        self.steps += 1
        if self.steps == 3:
            self.run.warn("gentle: three batches are enough")
            self.run.revise("", Verdict("kept", "gentler still"))
        return batch


@pytest.fixture
def gentle(techniques_restored: None) -> None:
    register("gentle", options=GentleOptions, after="precision", before="compile")(Gentle)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5))


def quiet(**settings: Any) -> Plan:
    return Plan().replace(
        precision="32-true", flash_attention="off", memory_format="off", inplace_activations="off", **settings
    )


@pytest.mark.usefixtures("gentle")
def test_it_is_a_setting_of_plans_that_is_checked_written_and_read() -> None:
    assert Plan().is_off("gentle")
    plan = Plan(techniques={"gentle": {"mode": "on", "spare": ["1"]}})
    assert plan.of("gentle") == GentleOptions(mode="on", spare=("1",))
    assert Plan.from_yaml(plan.to_yaml()) == plan
    on = Plan(techniques={"gentle": True})
    assert on == Plan(techniques={"gentle": "on"}) == Plan.from_yaml("techniques: {gentle: on}")
    assert repr(AccelPlugin.from_plan(on)) == "AccelPlugin(precision='auto', techniques={'gentle': 'on'})"
    with pytest.raises(
        ValueError, match=r"techniques\.gentle='of'; did you mean 'off'\? Allowed: 'off', 'on', GentleOptions"
    ):
        Plan(techniques={"gentle": "of"})
    with pytest.raises(ValueError, match=r"techniques\.gentle has no setting 'spares'; did you mean 'spare'"):
        Plan(techniques={"gentle": {"spares": []}})
    with pytest.raises(TypeError, match=r"no setting 'gentle': techniques=\{'gentle': 'on'\} sets it"):
        Plan(gentle="on")  # type: ignore[call-arg]
    assert declarations()["gentle"].doc.startswith('``"on"`` lets every dropout')


def test_it_stands_where_it_was_declared_to_stand_and_moves_no_other(request: pytest.FixtureRequest) -> None:
    before = list(declarations())
    request.getfixturevalue("gentle")
    names = list(declarations())
    assert names.index("precision") < names.index("gentle") < names.index("compile")
    assert [name for name in names if name != "gentle"] == before


@pytest.mark.usefixtures("gentle")
@pytest.mark.filterwarnings("ignore:gentle. three batches:lightning_accel.AccelWarning")
def test_it_is_at_work_in_a_plain_loop_reported_and_undone() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = accelerate(model, quiet(gentle={"mode": "on", "spare": ["3"]}), optimizers=optimizer)
    with handle.step():
        model(handle.batch(torch.randn(2, 8))).sum().backward()
    assert [model[1].p, model[3].p] == [0.0, 0.5]
    assert handle.report.applied("gentle") == ["optimizer 0", "1"]
    assert handle.report.refused("gentle") == {"3": "left alone, as gentle.spare says"}
    assert "+ gentle: in force (2 sites, 1 left alone)" in handle.report.summary()
    handle.undo()
    assert [model[1].p, model[3].p] == [0.5, 0.5]
    assert not hasattr(optimizer, "is_gentle")


@pytest.mark.usefixtures("gentle")
def test_optimizers_that_it_was_not_given_are_found() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(net().parameters(), lr=0.1)
    handle = accelerate(model, quiet(gentle=True))
    with handle.step():
        model(torch.randn(2, 8)).sum().backward()
    assert handle.report.applied("gentle") == ["optimizer 0", "1", "3"]
    assert optimizer.is_gentle  # type: ignore[attr-defined]
    assert not hasattr(other, "is_gentle")
    handle.undo()


@pytest.mark.usefixtures("gentle")
def test_what_it_notes_during_a_step_is_acted_on_after_it() -> None:
    model = net()
    handle = accelerate(model, quiet(gentle=True))
    for index in range(3):
        with pytest.warns(AccelWarning, match="three batches") if index == 2 else handle.step(), handle.step():
            handle.batch(torch.randn(2, 8))
    assert handle.report.of("gentle").changes[""] == "gentler still"
    assert handle.report.notes == ["gentle: three batches are enough"]
    handle.undo()


@pytest.mark.usefixtures("gentle")
@pytest.mark.filterwarnings("ignore:gentle. three batches:lightning_accel.AccelWarning")
def test_a_resumed_lightning_run_decides_as_the_first_one_did(
    make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = AccelPlugin(**vars(quiet(gentle=True, report=False)))
    trainer = make_trainer(plugins=[plugin], max_epochs=1, enable_checkpointing=False)
    module = Supervised(net())
    trainer.fit(module, vectors())
    assert "optimizer 0" in plugin.report.applied("gentle")
    trainer.save_checkpoint("run.ckpt")
    tried: list[str] = []
    monkeypatch.setattr(Gentle, "trial", lambda self, patches: tried.append("trial"))
    again = make_trainer(plugins=[AccelPlugin(**vars(plugin.plan))], max_epochs=2, enable_checkpointing=False)
    again.fit(copy.deepcopy(module), vectors(), ckpt_path="run.ckpt")
    assert {*again.precision_plugin.report.applied("gentle")} >= {"net.1", "net.3", "optimizer 0"}
    assert tried == []


@pytest.mark.usefixtures("gentle")
def test_it_is_on_the_page_of_hosts() -> None:
    assert when_asked(HOST, ExampleModel())["gentle: on"].words == "2 sites, tried on the first batch"


@pytest.mark.usefixtures("gentle")
@pytest.mark.filterwarnings("ignore:gentle. three batches:lightning_accel.AccelWarning")
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_it_has_its_row_in_the_table_that_tries_all_techniques(task: Any) -> None:
    row = table()["gentle=on"]
    model = model_for(task, row)
    before = structure(model)
    handle = start(model, row)
    Loop(model, task, handle).run(range(3))
    handle.undo()
    assert structure(model) | {"gradient strides": {}} == before | {"gradient strides": {}}


def test_a_name_that_is_taken_and_an_order_that_goes_round_are_errors() -> None:
    with pytest.raises(ValueError, match=r"a technique 'compile' already: Compilation\. Give it another name"):
        register("compile", options=GentleOptions)(Gentle)
    with pytest.raises(ValueError, match="cannot be called 'very gentle'"):
        register("very gentle", options=GentleOptions)(Gentle)
    before = list(declarations())
    with pytest.raises(ValueError, match=r"declared to come after another of them: .*precision.*first"):
        register("first", options=GentleOptions, after="precision", before="precision")(Gentle)
    assert list(declarations()) == before


PACKAGE = """
from typing import Literal

from lightning_accel.techniques import Technique, register


@register("calm", options=Literal["off", "on"], default="off", before="compile")
class Calm(Technique):
    pass
"""


@pytest.mark.medium
def test_an_installed_package_brings_its_technique_by_an_entry_point(tmp_path: Path) -> None:
    (tmp_path / "calm.py").write_text(PACKAGE)
    metadata = tmp_path / "calm-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: calm\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[lightning_accel.techniques]\ncalm = calm\nbroken = nowhere\n")
    use = "from lightning_accel import Plan; print(Plan(techniques={'calm': 'on'}).to_yaml())"
    done = subprocess.run(
        [sys.executable, "-c", use], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path)}
    )
    assert "calm: 'on'" in done.stdout, done.stderr
    assert "The technique 'broken' of nowhere could not be loaded: ModuleNotFoundError" in done.stderr
