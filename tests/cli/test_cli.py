"""AccelCLI: the ``accel:`` section, its flags, and what it says to a configuration that cannot be."""

from __future__ import annotations

import importlib.util
import operator
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jsonargparse")

from lightning.pytorch.accelerators import XLAAccelerator
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy

from lightning_accel import AccelCLI, AccelFSDPStrategy, AccelPlugin, MemoryOptions, Plan
from lightning_accel.cli import accel_cli as cli
from lightning_accel.data import Map, Normalize, RandomCrop

QUIET = [
    "--seed_everything=0",
    "--trainer.accelerator=cpu",
    "--trainer.logger=false",
    "--trainer.enable_checkpointing=false",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    "--trainer.max_steps=2",
    "--trainer.limit_val_batches=1",
]


@pytest.fixture(autouse=True)
def _no_arguments_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])


def build(*arguments: str, **options: Any) -> AccelCLI:
    """The command line up to the Trainer, without running anything."""
    return AccelCLI(BoringModel, args=[*QUIET, *arguments], run=False, **options)


def plan_of(command_line: LightningCLI) -> Plan:
    plugin = command_line.trainer.precision_plugin
    assert isinstance(plugin, AccelPlugin)
    return plugin.plan


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str, **options: Any) -> str:
    """The error message that ends the process."""
    with pytest.raises(SystemExit) as exit_:
        build(*arguments, **options)
    assert exit_.value.code == 2
    return capsys.readouterr().err.partition("error: ")[2]


def write(text: str) -> str:
    Path("config.yaml").write_text(text)
    return "--config=config.yaml"


def test_without_settings_it_is_the_default_plan() -> None:
    assert plan_of(build()) == Plan()


def test_flags_reach_the_plugin() -> None:
    plan = plan_of(build("--accel.precision=bf16-mixed", "--accel.compile=on", "--accel.report=false"))
    assert plan == Plan(precision="bf16-mixed", compile="on", report=False)


def test_the_section_reaches_the_plugin_and_flags_win_over_it() -> None:
    section = """
accel:
  precision: 32-true
  compile: off
  memory: {checkpoint: selective, blocks: [Linear]}
  techniques: {memory_format: off, loss: off}
"""
    plan = plan_of(build(write(section), "--accel.techniques.memory_format=channels_last", "--accel.memory.pack=auto"))
    assert plan.precision == "32-true"
    assert plan.techniques == {"memory_format": "channels_last", "loss": "off"}
    assert plan.compile == "off"
    assert plan.memory == MemoryOptions(checkpoint="selective", blocks=("Linear",), pack="auto")


def test_a_plan_written_as_yaml_is_a_section() -> None:
    plan = Plan(precision="16-mixed", memory={"checkpoint": "full", "blocks": ["Linear"]}, strict=True)
    text = "accel:\n" + "".join(f"  {line}\n" for line in plan.to_yaml().splitlines())
    assert plan_of(build(write(text))) == plan


@pytest.mark.parametrize("switch", ["on", "off", "true", "false"])
def test_yaml_switches_are_understood_bare(switch: str) -> None:
    """YAML 1.1 reads a bare ``off`` as a boolean."""
    plan = plan_of(build(write(f"accel: {{compile: {switch}}}")))
    assert plan.compile == ("on" if switch in ("on", "true") else "off")


@pytest.mark.medium
def test_trains_and_saves_a_configuration_that_trains_again() -> None:
    arguments = [*QUIET, "--trainer.max_steps=1", "--trainer.default_root_dir=run", "--accel.precision=32-true"]
    first = AccelCLI(BoringModel, args=["fit", *arguments])
    assert first.trainer.global_step == 1
    assert plan_of(first).precision == "32-true"
    again = AccelCLI(BoringModel, args=["fit", "--config=run/config.yaml"], save_config_callback=None)
    assert again.trainer.global_step == 1
    assert plan_of(again) == plan_of(first)


def test_keeps_the_other_plugins_and_the_trainer_defaults() -> None:
    plugins = write("trainer: {plugins: [{class_path: lightning.pytorch.plugins.io.TorchCheckpointIO}]}")
    command_line = build(plugins, trainer_defaults={"max_epochs": 7})
    assert plan_of(command_line) == Plan()
    assert type(command_line.trainer.strategy.checkpoint_io).__name__ == "TorchCheckpointIO"
    assert command_line.trainer.max_epochs == 7


def test_a_subclass_may_override_add_arguments_without_super() -> None:
    class Mine(AccelCLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_argument("--mine", default=1)

    assert (
        plan_of(Mine(BoringModel, args=[*QUIET, "--mine=2", "--accel.precision=32-true"], run=False)).precision
        == "32-true"
    )


def test_a_lightning_cli_takes_the_plugin_from_yaml() -> None:
    text = """
trainer:
  plugins:
    - class_path: lightning_accel.AccelPlugin
      init_args:
        precision: 32-true
        compile: off
        memory: {checkpoint: full, blocks: [Linear]}
        techniques: {loss: off}
"""
    plan = plan_of(LightningCLI(BoringModel, args=[*QUIET, write(text)], run=False))
    assert plan.precision == "32-true"
    assert plan.compile == "off"
    assert plan.memory == MemoryOptions(checkpoint="full", blocks=("Linear",))
    assert plan.techniques == {"loss": "off"}


def test_a_plan_written_as_yaml_is_valid_as_init_args() -> None:
    plan = Plan(precision="bf16-mixed", compile="auto", techniques={"memory_format": "channels_last"})
    init_args = "".join(f"        {line}\n" for line in plan.to_yaml().splitlines())
    text = f"trainer:\n  plugins:\n    - class_path: lightning_accel.AccelPlugin\n      init_args:\n{init_args}"
    assert plan_of(LightningCLI(BoringModel, args=[*QUIET, write(text)], run=False)) == plan


CHAIN = """[
  {class_path: RandomCrop, init_args: {size: 8, padding: 2, key: image}},
  {class_path: lightning_accel.data.Normalize, init_args: {mean: [0.1, 0.2, 0.3], std: 0.5, key: image}},
  {class_path: Map, init_args: {fn: operator.getitem}}]"""
TRANSFORMS = (
    RandomCrop(8, padding=2, key="image"),
    Normalize([0.1, 0.2, 0.3], 0.5, key="image"),
    Map(operator.getitem),
)


@pytest.mark.parametrize("command_line", ["LightningCLI", "AccelCLI"])
def test_transforms_are_written_as_classes_of_jsonargparse_are(command_line: str) -> None:
    if command_line == "AccelCLI":
        given = plan_of(build(write(f"accel: {{preprocess: {CHAIN}}}")))
    else:
        plugin = f"{{class_path: lightning_accel.AccelPlugin, init_args: {{preprocess: {CHAIN}}}}}"
        text = f"trainer: {{plugins: [{plugin}]}}"
        given = plan_of(LightningCLI(BoringModel, args=[*QUIET, write(text)], run=False))
    assert given.preprocess == TRANSFORMS
    assert Plan.from_yaml(given.to_yaml()) == given


def test_a_misspelt_transform_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, write("accel: {preprocess: [{class_path: RandomCorp, init_args: {size: 8}}]}"))
    assert "there is no transform 'RandomCorp'; did you mean 'RandomCrop'?" in said


# -- what cannot be ---------------------------------------------------------------------------------------------------


def test_a_misspelt_key_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, write("accel: {memroy: auto}"))
    assert "'memroy'; did you mean 'memory'?" in said


def test_a_misspelt_key_of_a_nested_mapping_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, write("accel: {memory: {checkpoint: full, bloks: [Linear]}}"))
    assert "'bloks'; did you mean 'blocks'?" in said


@pytest.mark.parametrize(
    ("flag", "near"),
    [("--accel.precission=auto", "accel.precision"), ("--trainer.max_epohcs=3", "trainer.max_epochs")],
)
def test_a_misspelt_flag_names_the_nearest(capsys: pytest.CaptureFixture[str], flag: str, near: str) -> None:
    assert f"did you mean '{near}'?" in complaint(capsys, flag)


def test_a_misspelt_key_behind_a_subcommand_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        AccelCLI(BoringModel, args=["fit", *QUIET, write("accel: {precission: auto}")])
    assert "did you mean 'accel.precision'?" in capsys.readouterr().err


PLUGIN = "--trainer.plugins=lightning_accel.AccelPlugin"
IN_YAML = "trainer: {plugins: [{class_path: lightning_accel.AccelPlugin, init_args: {%s}}]}"
WRONG = {  # as flags and in YAML
    "precison=auto": ("precison: auto", "no setting 'precison'; did you mean 'precision'?"),
    "loss=off": ("loss: 'off'", "no setting 'loss': techniques={'loss': 'off'} sets it"),
    "trust=mesured": ("trust: mesured", "trust='mesured'; did you mean 'measured'?"),
    "memory=12": ("memory: 12", "12 what? '12GiB' or '12%'."),
    "memory.chekpoint=full": ("memory: {chekpoint: full}", "no setting 'chekpoint'; did you mean 'checkpoint'?"),
    "techniques.losss=on": ("techniques: {losss: on}", "no technique 'losss'; did you mean 'loss'?"),
}


@pytest.mark.parametrize("kind", [AccelCLI, LightningCLI])
@pytest.mark.parametrize("flag", WRONG)
def test_wrong_settings_of_a_plugin_are_answered_in_one_line(
    capsys: pytest.CaptureFixture[str], flag: str, kind: type[LightningCLI]
) -> None:
    text, said = WRONG[flag]
    for arguments in ([PLUGIN, f"--trainer.plugins.{flag}"], [write(IN_YAML % text)]):
        with pytest.raises(SystemExit) as exit_:
            kind(BoringModel, args=[*QUIET, *arguments], run=False)
        assert exit_.value.code == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert said in error


# jsonargparse takes --accel.loss for an abbreviation of --accel.lossy.
@pytest.mark.parametrize("flag", [flag for flag in WRONG if flag != "loss=off"])
def test_wrong_settings_of_the_section_are_answered_in_one_line(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    text, said = WRONG[flag]
    for argument in (f"--accel.{flag}", write(f"accel: {{{text}}}")):
        error = complaint(capsys, argument)
        assert error.count("\n") == 1
        assert said.split("'")[-2] in error


def test_an_unknown_value_names_the_key_the_value_and_what_is_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, "--accel.precision=bf17")
    for part in ("accel: precision", "bf17", "'auto', 'off', '32-true', '16-mixed', 'bf16-mixed'"):
        assert part in said


def test_contradictory_settings_are_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, "--accel.compile=auto", "--accel.trust=unchecked")
    assert said.startswith(
        "accel: compile='auto' keeps what a trial showed to be faster, and trust='unchecked' forbids"
    )


@pytest.mark.parametrize("source", ["flag", "defaults"])
def test_precision_given_to_both_names_both(capsys: pytest.CaptureFixture[str], source: str) -> None:
    if source == "flag":
        said = complaint(capsys, "--trainer.precision=16-mixed")
    else:
        said = complaint(capsys, trainer_defaults={"precision": "16-mixed"})
    assert "trainer.precision='16-mixed' and accel.precision='auto'" in said


def test_two_accel_plugins_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, write("trainer: {plugins: [{class_path: lightning_accel.AccelPlugin}]}"))
    assert "trainer.plugins has an AccelPlugin and AccelCLI adds one" in said


def test_another_precision_plugin_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, write("trainer: {plugins: [{class_path: lightning.pytorch.plugins.DoublePrecision}]}"))
    assert "trainer.plugins has DoublePrecision and accel.precision='auto'" in said


@pytest.mark.parametrize("strategy", ["accel", "accel_ddp", "accel_fsdp"])
def test_a_strategy_of_ours_takes_the_section_s_plugin(strategy: str) -> None:
    command_line = build(f"--trainer.strategy={strategy}", "--trainer.devices=1", "--accel.precision=32-true")
    assert type(command_line.trainer.strategy) is type(StrategyRegistry.get(strategy))
    assert plan_of(command_line).precision == "32-true"


def test_settings_of_a_strategy_come_from_yaml() -> None:
    config = """
trainer:
  devices: 1
  strategy:
    class_path: lightning_accel.strategies.AccelFSDPStrategy
    init_args:
      save_distributed_checkpoint: true
      blocks: [Linear]
"""
    strategy = build(write(config)).trainer.strategy
    assert isinstance(strategy, AccelFSDPStrategy)
    assert strategy._save_distributed_checkpoint


def test_a_misspelt_strategy_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, "--trainer.strategy=accel_fdsp")
    assert "trainer.strategy='accel_fdsp' is not known; did you mean 'accel_fsdp'?" in said


@pytest.mark.parametrize(
    ("strategy", "instead"),
    [("fsdp", "accel_fsdp"), ("deepspeed_stage_3", "accel_fsdp")],
)
def test_a_strategy_that_takes_no_plugin_names_what_to_use(
    capsys: pytest.CaptureFixture[str], strategy: str, instead: str
) -> None:
    said = complaint(capsys, f"--trainer.strategy={strategy}")
    assert f"trainer.strategy={strategy!r} takes a precision plugin of its own" in said
    assert instead in said


@pytest.mark.parametrize("strategy", ["xla", "single_xla"])
def test_a_strategy_for_xla_is_given_its_own_plugin(capsys: pytest.CaptureFixture[str], strategy: str) -> None:
    """Which says here what it needs; with torch_xla it is run in tests/xla/."""
    if importlib.util.find_spec("torch_xla") is not None:
        pytest.skip("torch_xla is here")
    assert "accel: AccelXLAPlugin: torch_xla is not installed" in complaint(capsys, f"--trainer.strategy={strategy}")


@pytest.mark.parametrize(
    ("strategy", "accelerator", "is_for_xla"),
    [
        ("xla_debug", "cpu", True),
        ("accel_ddp", "tpu", False),  # which Lightning refuses itself
        ("auto", "tpu", True),
        (None, "cpu", False),
        (object.__new__(SingleDeviceXLAStrategy), None, True),
        (object.__new__(AccelFSDPStrategy), "tpu", False),
        ("auto", object.__new__(XLAAccelerator), True),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_where_xla_trains_is_told_by_the_strategy_then_by_the_accelerator(
    strategy: Any, accelerator: Any, is_for_xla: bool
) -> None:
    assert cli._is_for_xla(strategy, accelerator) is is_for_xla


def test_without_jsonargparse_it_names_the_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_JSONARGPARSE", cli.RequirementCache("jsonargparse[signatures]>=999"))
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-accel\[cli\]'"):
        build()
