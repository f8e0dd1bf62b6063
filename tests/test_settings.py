"""Settings are checked when they are made, and go to YAML and back without loss."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any, get_args

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st

from lightning_accel.arguments import arguments
from lightning_accel.core.checks import nearest
from lightning_accel.settings import Plan
from lightning_accel.techniques.compilation import CompileSetting
from lightning_accel.techniques.flash_attention.settings import FlashAttentionOptions
from lightning_accel.techniques.gradient_checkpointing.settings import CheckpointingMode, CheckpointingOptions
from lightning_accel.techniques.memory_format import MemoryFormatSetting
from lightning_accel.techniques.mixed_precision import PrecisionSetting

plans = st.builds(
    Plan,
    precision=st.sampled_from(get_args(PrecisionSetting)),
    inplace_activations=st.booleans() | st.sampled_from(["auto", "off"]),
    memory_format=st.sampled_from(get_args(MemoryFormatSetting)),
    gradient_checkpointing=st.one_of(
        st.sampled_from(get_args(CheckpointingMode)),
        st.just(False),
        st.builds(
            CheckpointingOptions,
            mode=st.sampled_from(get_args(CheckpointingMode)),
            blocks=st.lists(st.text(), max_size=3),
        ),
    ),
    compile=st.sampled_from(get_args(CompileSetting)).filter(lambda setting: setting != "auto") | st.booleans(),
    out_of_memory=st.sampled_from(["answer", "split", "off"]) | st.booleans(),
    log=st.booleans(),
    strict=st.booleans(),
    verify=st.booleans(),
)


@given(plans)
def test_every_plan_survives_yaml(plan: Plan) -> None:
    assert Plan.from_yaml(plan.to_yaml()) == plan


@given(plans)
def test_a_plan_as_a_dict_holds_plain_values_only(plan: Plan) -> None:
    def plain(value: Any) -> bool:
        if isinstance(value, dict):
            return all(isinstance(key, str) and plain(item) for key, item in value.items())
        return all(map(plain, value)) if type(value) is list else type(value) in (str, bool)

    assert plain(plan.to_dict())
    assert list(plan.to_dict()) == list(arguments())


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
        ("gradient_checkpointing: off", "gradient_checkpointing", "off"),
        ("flash_attention: off", "flash_attention", "off"),
        ("activation_offloading: off", "activation_offloading", "off"),
        ("activation_offloading: on", "activation_offloading", "host"),
        ("sparse_activations: off", "sparse_activations", "off"),
        ("sparse_activations: on", "sparse_activations", "auto"),
        ("preprocess: []", "preprocess", ()),
        ("preprocess:", "preprocess", ()),
        ("precision: 32-true", "precision", "32-true"),
    ],
)
def test_yaml_reads_as_it_looks(line: str, name: str, meant: object) -> None:
    """YAML 1.1 turns a bare ``off`` into False before we see it."""
    assert getattr(Plan.from_yaml(line), name) == meant


# Setting, value, what the message must name besides both.
BAD_VALUES: list[tuple[str, Any, str]] = [
    ("precision", "bf16", "'bf16-mixed'"),
    ("report", "report.pdf", ".html, .md, .json"),
    ("report", 3, "'off'"),
    ("precision", 16, "'16-mixed'"),
    ("precision", None, "'auto'"),
    ("precision", ["auto"], "'auto'"),
    ("inplace_activations", "yes", "'auto', 'off'"),
    ("inplace_activations", 1, "'auto', 'off'"),
    ("memory_format", "channel_last", "did you mean 'channels_last'?"),
    ("memory_format", True, "'auto', 'off'"),
    ("memory_budget", "much", "'12GiB'"),
    ("gradient_checkpointing", "on", "'full', 'selective'"),
    ("gradient_checkpointing", True, "'full', 'selective'"),
    ("gradient_checkpointing", 0.5, "a mapping of mode, blocks"),
    ("compile", "fast", "'on', 'auto'"),
    ("compile", 1, "'on', 'auto'"),
    ("graphs", "yes", "'auto', 'on', 'off'"),
    ("flash_attention", "flash_attn", "did you mean 'flash-attn'?"),
    ("flash_attention", 2, "'sdpa', 'cudnn'"),
    ("activation_offloading", "cpu", "'off'"),
    ("activation_offloading", {"to": "ram"}, "'host', 'disk'"),
    ("activation_offloading", {"to": "host", "min_bytes": "many"}, "an int of bytes"),
    ("activation_offloading", {"to": "disk", "folder": "/nowhere"}, "one that exists"),
    ("activation_offloading", {"to": "host", "pinned": 1}, "to, min_bytes, folder"),
    ("sparse_activations", "on", "'auto', 'off'"),
    ("sparse_activations", 0.5, "'auto', 'off'"),
    ("optimizer", "adamw", "'auto', 'off', 'foreach', 'fused'"),
    ("optimizer", True, "'auto', 'off', 'foreach', 'fused'"),
    ("preprocess", ["normalize"], "the transforms of lightning_accel.data"),
    ("preprocess", "normalize", "a list"),
    ("preprocess", 3, "a list"),
    ("loss", "chunked", "'auto', 'on', 'off'"),
    ("loss", 1, "'auto', 'on', 'off'"),
    ("matmul_precision", "tf32", "'high', 'medium'"),
    ("matmul_precision", True, "'auto', 'high'"),
    ("cudnn_benchmark", "yes", "'auto', 'on'"),
    ("cudnn_benchmark", 1, "'auto', 'on'"),
    ("float8", "row", "did you mean 'rowwise'?"),
    ("float8", 8, "'tensorwise', 'rowwise'"),
    ("optimizer_8bit", "adamw", "'off', 'on'"),
    ("optimizer_8bit", 8, "'off', 'on'"),
    ("allocator", "jemalloc", "'auto', 'off'"),
    ("threads", 0, "'auto', or a number from 1 on"),
    ("threads", True, "a number from 1 on"),
    ("threads", "2", "a number from 1 on"),
    ("loader", "fast", "'auto', 'off'"),
    ("loader", 2, "'auto', 'off'"),
    ("padding", 1, "'auto', or a number above 1"),
    ("padding", True, "a number above 1"),
    ("padding", "8", "a number above 1"),
    ("padding", {"multiple": 8, "group_by_length": "yes"}, "True, False"),
    ("padding", {"multiple": "off", "group_by_length": True}, "Give a multiple"),
    ("tune", "on", "'auto', 'off'"),
    ("out_of_memory", "halve", "'answer', 'split', 'off'"),
    ("log", "false", "True, False"),
    ("strict", None, "True, False"),
    ("verify", 0, "True, False"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD_VALUES)
def test_a_bad_value_is_named_with_its_argument_and_what_is_allowed(name: str, value: Any, allowed: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        Plan().replace(**{name: value})
    assert name in str(error.value)
    shown = [repr(part) for item in value.items() for part in item] if isinstance(value, dict) else [repr(value)]
    shown += [repr(part) for part in value] if isinstance(value, list) else []
    assert any(text in str(error.value) for text in shown)
    assert allowed in str(error.value)


def test_flash_attention_takes_sites_to_skip_and_to_force() -> None:
    plan = Plan(techniques={"flash_attention": {"backend": "auto", "skip": ["encoder.0"], "force": ["Attention"]}})
    assert plan.of("flash_attention") == FlashAttentionOptions(skip=("encoder.0",), force=("Attention",))
    assert Plan.from_yaml(plan.to_yaml()) == Plan(techniques={"flash_attention": plan.to_dict()["flash_attention"]})
    assert Plan(techniques={"flash_attention": True}).of("flash_attention") == FlashAttentionOptions()
    assert Plan(techniques={"flash_attention": False}).of("flash_attention").backend == "off"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"skip": "encoder"}, r"flash_attention\.skip='encoder': give a list"),
        ({"backend": "flash3"}, r"flash_attention\.backend='flash3'; did you mean 'flash'"),
        ({"only": []}, "flash_attention has no setting 'only'"),
    ],
)
def test_a_bad_part_of_flash_attention_is_named(value: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Plan(techniques={"flash_attention": value})


def test_every_setting_has_a_bad_value_in_the_table() -> None:
    assert {name for name, _, _ in BAD_VALUES} == set(arguments())


@pytest.mark.parametrize("blocks", ["Block", 5, None, [1], {"Block": 1}])
def test_blocks_of_a_wrong_type_are_an_error_that_shows_how_to_name_blocks(blocks: Any) -> None:
    with pytest.raises(TypeError, match=r"gradient_checkpointing\.blocks=.*list of class names or module paths"):
        Plan(memory={"checkpoint": "full", "blocks": blocks})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"precison": "auto"}, r"no setting 'precison'; did you mean 'precision'\? Allowed: preprocess, "),
        ({"memoryformat": "auto"}, "did you mean 'memory_format'"),
        ({"checkpointing": "full"}, "did you mean 'gradient_checkpointing'"),
        ({"zzz": 1}, r"no setting 'zzz'\. Allowed: "),
        ({3: 1}, "no setting 3"),
        (
            {"gradient_checkpointing": {"mod": "full"}},
            r"gradient_checkpointing has no setting 'mod'; did you mean 'mode'",
        ),
        ({"gradient_checkpointing": {"mode": "fulll"}}, r"gradient_checkpointing\.mode='fulll'; did you mean 'full'"),
    ],
)
def test_a_misspelt_key_is_an_error_that_names_the_nearest(values: dict[Any, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_dict(values)


@pytest.mark.parametrize("text", ["- precision", "plan.yaml", "42"])
def test_yaml_that_is_no_mapping_is_an_error(text: str) -> None:
    with pytest.raises(TypeError, match="A plan is a mapping of settings to values"):
        Plan.from_yaml(text)


def test_settings_that_contradict_each_other_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"compile='auto'.*trust='unchecked'.*compile='on' or 'off'"):
        Plan(compile="auto", trust="unchecked")


def test_a_plan_is_a_value() -> None:
    assert Plan(compile=True) == Plan(compile="on")
    assert hash(Plan()) == hash(Plan())
    with pytest.raises(FrozenInstanceError):
        Plan().precision = "16-mixed"
    assert Plan().replace(precision="16-mixed") == Plan(precision="16-mixed")
    assert copy.deepcopy(Plan(techniques={"flash_attention": {"skip": ["a"]}})) == Plan(
        techniques={"flash_attention": {"skip": ["a"]}}
    )
    assert pickle.loads(pickle.dumps(Plan(compile="on"))) == Plan(compile="on")


def test_checkpointing_is_always_available_in_its_long_form() -> None:
    selective = Plan(memory={"checkpoint": "selective"})
    assert selective.of("gradient_checkpointing") == CheckpointingOptions(mode="selective")
    assert Plan().of("gradient_checkpointing").mode == "off"
    named = Plan(memory={"checkpoint": "full", "blocks": ["Block"]})
    assert named.of("gradient_checkpointing") == CheckpointingOptions(mode="full", blocks=("Block",))


def test_nothing_is_suggested_where_nothing_is_near() -> None:
    assert nearest("zzz", ["precision", "compile"]) == ""


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["12 GB", "12GiB", "512 mib", "0.6", "60%", 0.6, 1.0, 2**30])
def test_a_budget_is_bytes_text_or_a_fraction(budget: Any) -> None:
    plan = Plan(memory=budget)
    assert plan.memory_budget == budget
    assert Plan.from_yaml(plan.to_yaml()) == plan


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("-3GiB", "not positive"),
        (-1, "not positive"),
        (0, "not positive"),
        (0.0, "not positive"),
        ("much", "no amount of memory"),
        ("12 GiBs", "no amount of memory"),
        (float("nan"), "no amount of memory"),
        (1.5, "Did you mean '1.5GiB'?"),
        ("12", "Did you mean '12GiB'?"),
        ("160%", "more than the device has"),
        (None, "of type NoneType"),
        (True, "of type bool"),
        ([1], "of type list"),
    ],
)
def test_another_budget_is_an_error_that_shows_how_to_write_one(budget: Any, said: str) -> None:
    with pytest.raises((ValueError, TypeError)) as error:
        Plan(memory=budget)
    assert "memory_budget" in str(error.value)
    assert repr(budget) in str(error.value)
    assert said in str(error.value)
    assert "'12GiB'" in str(error.value)


def test_a_bare_budget_is_shown_its_place() -> None:
    with pytest.raises(ValueError, match="memory.budget='12GiB'"):
        Plan(memory={"checkpoint": "8GiB"})  # type: ignore[arg-type]


def test_a_budget_and_a_mode_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="Give one of the two"):
        Plan(memory={"budget": "1GiB", "checkpoint": "selective"})


def test_a_budget_is_not_for_compiled_blocks() -> None:
    with pytest.raises(ValueError, match=r"compile='on'.*as they run eagerly"):
        Plan(compile="on", memory="1GiB")


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_what_records_cuda_graphs_cannot_offload(mode: Any) -> None:
    with pytest.raises(ValueError, match=r"CUDA graphs.*max-autotune-no-cudagraphs"):
        Plan(compile=mode, memory={"offload": "host"})


def test_offloading_in_detail_survives_yaml() -> None:
    plan = Plan(memory={"offload": {"to": "disk", "min_bytes": "64KiB"}})
    assert plan.of("activation_offloading").to == "disk"
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_to_say_nothing_of_offloading_is_not_to_forbid_it() -> None:
    assert Plan().of("activation_offloading").to == "auto"
    assert Plan(memory={"offload": False}).of("activation_offloading").to == "off"
    assert not Plan().of("activation_offloading").always


@pytest.mark.parametrize("setting", ["auto", "off", {"to": "off"}, {"to": "auto", "min_bytes": "2MiB"}])
def test_offloading_stays_what_it_is_on_the_way_to_yaml_and_back(setting: Any) -> None:
    plan = Plan(memory={"offload": setting, "budget": "1GiB"})
    again = Plan.from_yaml(plan.to_yaml())
    assert again == plan
    assert again.of("activation_offloading") == plan.of("activation_offloading")
