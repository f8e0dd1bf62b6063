"""Settings are checked when they are made, and go to YAML and back without loss."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any, get_args

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st

from lightning_accel import AccelPlugin, FlashAttentionOptions, MemoryOptions, OffloadingOptions, Plan, PrecisionOptions
from lightning_accel.arguments import DEFAULTS, LoaderOptions, PrecisionFormat, Trust
from lightning_accel.core.checks import nearest
from lightning_accel.techniques.compilation import CompileSetting
from lightning_accel.techniques.gradient_checkpointing.technique import CheckpointingMode, CheckpointingOptions
from lightning_accel.techniques.memory_format import MemoryFormatSetting
from lightning_accel.techniques.registry import declarations

memory = st.one_of(
    st.sampled_from(["auto", "off"]) | st.booleans(),
    st.builds(
        MemoryOptions,
        checkpoint=st.sampled_from(get_args(CheckpointingMode)) | st.just(False),
        blocks=st.lists(st.text(), max_size=3),
        pack=st.booleans(),
        on_oom=st.sampled_from(["answer", "split", "off"]) | st.booleans(),
    ),
)
plans = st.builds(
    Plan,
    precision=st.sampled_from(get_args(PrecisionFormat)),
    compile=st.sampled_from(get_args(CompileSetting)).filter(lambda setting: setting != "auto") | st.booleans(),
    memory=memory,
    techniques=st.fixed_dictionaries(
        {},
        optional={
            "inplace_activations": st.booleans() | st.sampled_from(["auto", "off"]),
            "memory_format": st.sampled_from(get_args(MemoryFormatSetting)),
            "flash_attention": st.builds(FlashAttentionOptions, skip=st.lists(st.text(), max_size=3)),
        },
    ),
    lossy=st.fixed_dictionaries({}, optional={"optimizer_8bit": st.booleans()}),
    trust=st.sampled_from(get_args(Trust)),
    report=st.booleans() | st.just("report.md"),
    strict=st.booleans(),
)


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(item) for key, item in value.items())
    return all(map(plain, value)) if type(value) is list else type(value) in (str, bool)


@pytest.mark.medium
@given(plans)
def test_every_plan_survives_yaml_as_plain_values(plan: Plan) -> None:
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert Plan.from_dict(plan.to_dict(whole=False)) == plan
    assert plain(plan.to_dict())
    assert list(plan.to_dict()) == list(DEFAULTS)


def test_there_are_ten_and_both_takers_show_them() -> None:
    assert len(DEFAULTS) == 10
    for taker in (Plan, AccelPlugin):
        assert list(inspect.signature(taker).parameters) == list(DEFAULTS)
        for name in DEFAULTS:
            assert f"\n    {name}: " in (inspect.getdoc(taker.__init__) or "")


def test_yaml_goes_to_a_file_and_comes_back() -> None:
    plan = Plan(precision="bf16-mixed", memory={"checkpoint": "selective", "blocks": ["Block"]})
    text = plan.to_yaml("plan.yaml")
    assert Path("plan.yaml").read_text(encoding="utf-8") == text
    assert Plan.from_yaml(Path("plan.yaml")) == plan


@pytest.mark.parametrize("text", ["", "{}", "# nothing but a comment"])
def test_empty_yaml_is_the_default_plan(text: str) -> None:
    assert Plan.from_yaml(text) == Plan()


@pytest.mark.parametrize(
    ("line", "name", "meant"),
    [
        ("compile: off", "compile", "off"),
        ("compile: on", "compile", "on"),
        ("compile: no", "compile", "off"),
        ("precision: off", "precision", "32-true"),
        ("memory: off", "memory", "off"),
        ("memory: on", "memory", "auto"),
        ("memory: 40%", "memory", "40%"),
        ("memory: {budget: 12GiB}", "memory", "12GiB"),
        ("memory: {offload: on}", "memory", MemoryOptions(offload="host")),
        ("memory: {pack: on}", "memory", MemoryOptions(pack="auto")),
        ("memory: {on_oom: off}", "memory", MemoryOptions(on_oom="off")),
        ("techniques: {flash_attention: off}", "techniques", {"flash_attention": "off"}),
        ("techniques: {flash_attention: on}", "techniques", {}),
        ("techniques: {loss: on}", "techniques", {"loss": "on"}),
        ("lossy: {float8: on}", "lossy", {"float8": "tensorwise"}),
        ("loader: on", "loader", "auto"),
        ("loader: {padding: 64}", "loader", LoaderOptions(padding=64)),
        ("report: off", "report", False),
        ("report: report.html", "report", "report.html"),
        ("preprocess: []", "preprocess", ()),
        ("preprocess:", "preprocess", ()),
        ("precision: {format: 32-true}", "precision", "32-true"),
        ("precision: {matmul: high}", "precision", PrecisionOptions(matmul="high")),
    ],
)
def test_yaml_reads_as_it_looks(line: str, name: str, meant: object) -> None:
    """YAML 1.1 turns a bare ``off`` into False before we see it."""
    assert getattr(Plan.from_yaml(line), name) == meant


# Setting, value, what the message must name besides both.
BAD_VALUES: list[tuple[str, Any, str]] = [
    ("precision", "bf16", "did you mean 'bf16-mixed'?"),
    ("precision", 16, "'16-mixed'"),
    ("precision", None, "'auto'"),
    ("precision", ["auto"], "'auto'"),
    ("precision", {"matmul": "tf32"}, "'high', 'medium'"),
    ("compile", "fast", "'on', 'auto'"),
    ("compile", 1, "CompileOptions(mode=, graphs=)"),
    ("compile", {"graphs": "yes"}, "'auto', 'on', 'off'"),
    ("memory", 12, "12 what? '12GiB' or '12%'."),
    ("memory", 0.4, "0.4 what? '0.4GiB' or '40%'."),
    ("memory", 1.5, "1.5 what? '1.5GiB'"),
    ("memory", "12", "12 what?"),
    ("memory", "mauto", "did you mean 'auto'?"),
    ("memory", "-3GiB", "not positive"),
    ("memory", "12 GiBs", "no amount of memory"),
    ("memory", float("nan"), "no amount of memory"),
    ("memory", "160%", "more than the device has"),
    ("memory", None, "'12GiB'"),
    ("memory", [1], "'12GiB'"),
    ("memory", {"checkpoint": "ful"}, "did you mean 'full'?"),
    ("memory", {"checkpoint": 0.5}, "'full', 'selective'"),
    ("memory", {"blocks": "Block"}, "a list of class names or module paths"),
    ("memory", {"blocks": [1]}, "a list of class names or module paths"),
    ("memory", {"pack": "yes"}, "'auto', 'off'"),
    ("memory", {"on_oom": "halve"}, "'answer', 'split', 'off'"),
    ("memory", {"offload": "cpu"}, "OffloadingOptions(to=, min_bytes=, folder=)"),
    ("memory", {"offload": {"to": "ram"}}, "'host', 'disk'"),
    ("memory", {"offload": {"min_bytes": "many"}}, "an int of bytes"),
    ("memory", {"offload": {"folder": "/nowhere"}}, "a folder that exists"),
    ("memory", {"offload": {"pinned": 1}}, "to, min_bytes, folder"),
    ("techniques", 5, "{'loss': 'off'}"),
    ("techniques", {"losss": "off"}, "did you mean 'loss'?"),
    ("techniques", {"float8": "rowwise"}, "lossy={'float8': 'rowwise'} sets it"),
    ("techniques", {"gradient_checkpointing": "full"}, "memory=MemoryOptions(checkpoint='full') sets it"),
    ("techniques", {"compile": "on"}, "compile='on' sets it"),
    ("techniques", {"inplace_activations": 1}, "'auto', 'off'"),
    ("techniques", {"memory_format": "channel_last"}, "did you mean 'channels_last'?"),
    ("techniques", {"flash_attention": "flash_attn"}, "did you mean 'flash-attn'?"),
    ("techniques", {"flash_attention": {"backend": "flash3"}}, "did you mean 'flash'"),
    ("techniques", {"flash_attention": {"skip": "encoder"}}, "a list of class names"),
    ("techniques", {"flash_attention": {"only": []}}, "no setting 'only'"),
    ("techniques", {"optimizer": "adamw"}, "'auto', 'off', 'foreach', 'fused'"),
    ("techniques", {"loss": "chunked"}, "'auto', 'on', 'off'"),
    ("techniques", {"cudnn_benchmark": "yes"}, "'auto', 'on'"),
    ("techniques", {"allocator": "jemalloc"}, "'auto', 'off'"),
    ("techniques", {"threads": 0}, "a number from 1 on"),
    ("techniques", {"threads": "2"}, "a number from 1 on"),
    ("preprocess", ["normalize"], "the transforms of lightning_accel.data"),
    ("preprocess", "normalize", "a list"),
    ("loader", "fast", "'auto', 'on', 'off'"),
    ("loader", 64, "LoaderOptions(workers=, padding=, group_by_length=)"),
    ("loader", {"padding": 1}, "a number above 1"),
    ("loader", {"padding": "8"}, "a number above 1"),
    ("loader", {"group_by_length": "yes"}, "True, False"),
    ("loader", {"padding": "off", "group_by_length": True}, "Give a multiple"),
    ("lossy", {"float8": "row"}, "did you mean 'rowwise'?"),
    ("lossy", {"optimizer_8bit": 8}, "'off', 'on'"),
    ("lossy", {"loss": "on"}, "techniques={'loss': 'on'} sets it"),
    ("trust", "mesured", "did you mean 'measured'?"),
    ("trust", False, "'measured', 'checked', 'unchecked'"),
    ("report", "report.pdf", ".html, .md, .json"),
    ("report", 3, "True, False"),
    ("strict", None, "True, False"),
    ("strict", 0, "True, False"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD_VALUES)
def test_a_bad_value_is_named_with_its_setting_and_what_is_allowed_in_a_line(
    name: str, value: Any, allowed: str
) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        Plan(**{name: value})
    said = str(error.value)
    assert allowed in said
    assert "\n" not in said
    assert name in said or "flash_attention" in said


def test_every_setting_has_a_bad_value_in_the_table() -> None:
    assert {name for name, _, _ in BAD_VALUES} == set(DEFAULTS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"precison": "auto"}, r"Plan has no setting 'precison'; did you mean 'precision'\? Allowed: precision, "),
        ({"zzz": 1}, r"no setting 'zzz'\. Allowed: "),
        ({3: 1}, "no setting '3'"),
        ({"gradient_checkpointing": "full"}, r"no setting .*: memory=MemoryOptions\(checkpoint='full'\) sets it"),
        ({"loss": "off"}, r"techniques=\{'loss': 'off'\} sets it"),
        ({"float8": "rowwise"}, r"lossy=\{'float8': 'rowwise'\} sets it"),
        ({"graphs": "on"}, r"compile=CompileOptions\(graphs='on'\) sets it"),
        ({"memory_budget": "1GiB"}, r"memory='1GiB' sets it"),
    ],
)
def test_a_misspelt_or_misplaced_key_is_an_error_that_names_the_right_one(values: dict[Any, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Plan.from_dict(values)


def test_a_misspelt_option_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="memory has no setting 'chekpoint'; did you mean 'checkpoint'"):
        Plan(memory={"chekpoint": "full"})


@pytest.mark.parametrize("text", ["- precision", "plan.yaml", "42"])
def test_yaml_that_is_no_mapping_is_an_error(text: str) -> None:
    with pytest.raises(TypeError, match="A plan is a mapping of settings to values"):
        Plan.from_yaml(text)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compile": "auto", "trust": "unchecked"}, r"compile='auto'.*trust='unchecked'.*compile='on' or 'off'"),
        ({"memory": {"budget": "1GiB", "checkpoint": "selective"}}, "Give one of the two"),
        ({"memory": "1GiB", "compile": "on"}, r"compile='on'.*as they run eagerly"),
        ({"memory": {"offload": "host"}, "compile": "max-autotune"}, r"CUDA graphs.*max-autotune-no-cudagraphs"),
        ({"memory": {"offload": "host"}, "compile": "reduce-overhead"}, r"CUDA graphs.*max-autotune-no-cudagraphs"),
        ({"compile": {"mode": "on", "graphs": "on"}}, "a compiler has CUDA graphs of its own"),
    ],
)
def test_settings_that_contradict_each_other_are_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**settings)


def test_a_plan_is_a_value() -> None:
    assert Plan(compile=True) == Plan(compile="on") == Plan(compile={"mode": "on"})
    assert hash(Plan()) == hash(Plan(techniques={"loss": "auto"}))
    with pytest.raises(FrozenInstanceError):
        Plan().precision = "16-mixed"
    with pytest.raises(TypeError):
        Plan().techniques["loss"] = "off"  # type: ignore[index]
    attention = Plan(techniques={"flash_attention": {"skip": ["a"]}})
    assert copy.deepcopy(attention) == pickle.loads(pickle.dumps(attention)) == attention


def test_it_shows_what_differs_from_the_defaults() -> None:
    assert repr(Plan()) == "Plan()"
    plan = Plan(memory=MemoryOptions(checkpoint="full"), techniques={"loss": "off", "threads": "off"})
    assert repr(plan) == "Plan(memory=MemoryOptions(checkpoint='full'), techniques={'loss': 'off'})"
    assert plan.to_dict(whole=False) == {"memory": {"checkpoint": "full"}, "techniques": {"loss": "off"}}


def test_a_plan_with_some_settings_changed_also_by_the_names_of_techniques() -> None:
    plan = Plan(techniques={"loss": "off"}, memory={"pack": "auto"}, precision={"matmul": "high"})
    changed = plan.replace(techniques={"allocator": "off"}, gradient_checkpointing="full", precision="16-mixed")
    assert changed.techniques == {"loss": "off", "allocator": "off"}
    assert changed.memory == MemoryOptions(checkpoint="full", pack="auto")
    assert changed.precision == PrecisionOptions(format="16-mixed", matmul="high")
    assert plan.replace(loss="auto", float8="rowwise") == plan.replace(
        techniques={"loss": "auto"}, lossy={"float8": "rowwise"}
    )
    for name in declarations():  # whatever a technique is set to, it is read back so
        assert plan.replace(**{name: plan.of(name)}) == plan
    with pytest.raises(TypeError, match="no setting 'los'"):
        plan.replace(los="off")


def test_techniques_have_their_options_whole() -> None:
    assert Plan(memory={"checkpoint": "full", "blocks": ["Block"]}).of(
        "gradient_checkpointing"
    ) == CheckpointingOptions(mode="full", blocks=("Block",))
    assert Plan().of("gradient_checkpointing").mode == "off"
    assert Plan(techniques={"flash_attention": False}).of("flash_attention").backend == "off"
    assert Plan().of("activation_offloading") == OffloadingOptions()
    assert not Plan().of("activation_offloading").always
    assert Plan(memory="off").of("activation_offloading").to == "off"
    assert Plan(memory="off").on_oom == "off"


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    assert nearest("zzz", ["precision", "compile"]) == ""


def test_a_report_at_a_path_is_checked_and_kept_like_its_text() -> None:
    with pytest.raises(ValueError, match=r"report=.run\.txt.*\.html, \.md, \.json"):
        Plan(report=Path("run.txt"))
    plan = Plan(report=Path("run.html"))
    assert copy.deepcopy(plan) == Plan.from_yaml(plan.to_yaml()) == Plan(report="run.html")


@pytest.mark.parametrize("budget", ["12 GB", "12GiB", "512 mib", "60%", 2**30])
def test_a_budget_is_text_or_a_share(budget: Any) -> None:
    plan = Plan(memory={"budget": budget})
    assert plan.memory == budget
    assert Plan.from_yaml(plan.to_yaml()) == plan


@pytest.mark.parametrize("offload", ["auto", "off", {"to": "off"}, {"to": "disk", "min_bytes": "64KiB"}])
def test_offloading_stays_what_it_is_on_the_way_to_yaml_and_back(offload: Any) -> None:
    plan = Plan(memory={"budget": "1GiB", "offload": offload})
    again = Plan.from_yaml(plan.to_yaml())
    assert again == plan
    assert again.of("activation_offloading") == plan.of("activation_offloading")
