"""What is sharded, what is gathered in which dtype, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_accel import AccelFSDPStrategy
from strategies.conftest import Said

pytestmark = pytest.mark.numbers

BLOCKS = ("net.blocks.0", "net.blocks.1", "net.blocks.2")


def changed(said: dict[str, Any], technique: str) -> list[str]:
    return list(said["techniques"][technique]["applied"])


@pytest.mark.medium
def test_blocks_are_sharded_one_by_one_and_the_rest_as_a_whole(said: Said) -> None:
    sharding = said("blocks_are_sharded")[0]["sharding"]
    assert (sharding["units"], sharding["roots"], sharding["left"]) == (BLOCKS, ("",), {})


@pytest.mark.medium
def test_the_report_says_what_is_gathered_one_by_one(said: Said) -> None:
    (note,) = said("blocks_are_sharded")[0]["notes"]
    assert note == "accel_fsdp: 3 blocks (net.blocks.0 to net.blocks.2) are gathered one by one, the rest together"
    assert any("net.blocks.1 is not gathered by itself" in n for n in said("a_block_shares_its_weight")[0]["notes"])


@pytest.mark.medium
def test_each_rank_holds_its_rows_of_every_parameter(said: Said) -> None:
    first, second = (rank["shards"] for rank in said("blocks_are_sharded"))
    assert first["net.head.weight"] == (6, 16)  # of eleven
    assert second["net.head.weight"] == (5, 16)
    assert first["net.blocks.0.qkv.weight"] == second["net.blocks.0.qkv.weight"] == (24, 16)
    assert all(first.values())


@pytest.mark.medium
def test_named_blocks_are_sharded_instead(said: Said) -> None:
    assert said("named_blocks_are_sharded")[0]["sharding"]["units"] == ("net.blocks.1", "net.embedding")


@pytest.mark.medium
def test_sharding_in_other_units_changes_no_number(said: Said) -> None:
    plain, named = said("blocks_are_sharded")[0], said("named_blocks_are_sharded")[0]
    torch.testing.assert_close(plain["weights"], named["weights"], rtol=1e-6, atol=1e-7)


@pytest.mark.medium
def test_blocks_that_share_a_weight_are_left_to_the_root(said: Said) -> None:
    sharding = said("a_block_shares_its_weight")[0]["sharding"]
    assert sharding["units"] == ("net.blocks.0",)
    assert sharding["left"] == {
        "net.blocks.1": "shares parameters with net.blocks.2",
        "net.blocks.2": "shares parameters with net.blocks.1",
    }


@pytest.mark.medium
def test_scalar_parameters_train_as_they_are(said: Said) -> None:
    for rank in said("scalar_parameters"):
        torch.testing.assert_close(rank["weights"], rank["weights of accel_ddp"], rtol=1e-5, atol=1e-6)
        assert rank["shards"]["extra"] is False


@pytest.mark.medium
def test_weights_are_gathered_in_bfloat16_and_kept_in_float32(said: Said) -> None:
    rank = said("bfloat16")[1]
    assert (rank["gathered"], rank["kept"], rank["gradient"]) == ("torch.bfloat16", "torch.float32", "torch.float32")


@pytest.mark.medium
def test_batch_norms_are_gathered_in_float32(said: Said) -> None:
    assert said("bfloat16_and_a_batch_norm")[0]["gathered"] == "torch.float32"


@pytest.mark.medium
def test_norms_take_float32_inputs_in_bfloat16(said: Said) -> None:
    """CPU autocast does not cast for norms: their weights have to stay in float32."""
    rank = said("bfloat16_and_a_norm_of_float32_inputs")[0]
    assert rank["sharding"]["units"] == ("net.0", "net.1", "net.2")
    assert len(rank["losses"]) == 3


@pytest.mark.medium
def test_a_float32_buffer_between_layers_is_no_obstacle_in_bfloat16(said: Said) -> None:
    """Without autocast the layer after it would be given float32 for its bfloat16 weights."""
    low, full = said("bfloat16_and_a_float32_buffer")[0]["losses"], said("nothing_is_repeated")[0]["losses"]
    assert low == pytest.approx(full, rel=2e-2)


@pytest.mark.medium
def test_gathered_weights_are_not_offloaded(said: Said) -> None:
    rank = said("offloading_leaves_gathered_weights_alone")[0]
    assert rank["losses"] == pytest.approx(said("blocks_are_sharded")[0]["losses"], rel=1e-6)
    assert rank["offloaded_parameters"] == []


@pytest.mark.medium
@pytest.mark.parametrize(
    "scenario", ["checkpointed_and_captured", pytest.param("checkpointed_and_compiled", marks=pytest.mark.slow)]
)
def test_checkpointed_and_compiled_blocks_compute_the_same(said: Said, scenario: str) -> None:
    both = said(scenario)[0]
    assert changed(both, "gradient_checkpointing") == changed(both, "compile") == list(BLOCKS)
    assert both["losses"] == pytest.approx(said("blocks_are_sharded")[0]["losses"], rel=1e-5)


@pytest.mark.medium
def test_a_technique_that_cannot_be_is_named_where_it_was_asked_for(said: Said) -> None:
    rank = said("techniques_that_cannot_be")[0]
    assert any("memory_budget: not with sharded parameters" in warning for warning in rank["warnings"])
    assert not any("memory_format" in warning for warning in rank["warnings"])  # "auto" is no wish
    assert "FSDP keeps weights row by row" in rank["techniques"]["memory_format"]["status"]


@pytest.mark.medium
def test_the_module_can_be_called_outside_of_its_steps(said: Said) -> None:
    assert said("the_module_is_called_between_epochs")[0]["shape"] == (1, 4, 11)


@pytest.mark.medium
def test_evaluations_leave_nothing_behind_that_grows(said: Said) -> None:
    assert said("an_evaluation_between_steps")[0]["calls"] == 3  # those of the last training step


@pytest.mark.medium
def test_a_module_that_shards_itself_is_left_as_it_is(said: Said) -> None:
    rank = said("configure_model_shards_by_itself")[0]
    assert rank["sharding"] is None
    assert rank["losses"] == pytest.approx(said("blocks_are_sharded")[0]["losses"], rel=1e-6)


@pytest.mark.medium
def test_the_plugin_works_under_lightning_s_own_model_parallel_strategy(said: Said) -> None:
    rank = said("lightning_s_own_strategy_and_configure_model")[0]
    assert changed(rank, "gradient_checkpointing") == list(BLOCKS)
    assert rank["losses"] == pytest.approx(said("blocks_are_sharded")[0]["losses"], rel=1e-5)


@pytest.mark.medium
@pytest.mark.slow
def test_blocks_are_compiled_under_lightning_s_own_model_parallel_strategy(said: Said) -> None:
    rank = said("lightning_s_own_strategy_and_compiled")[0]
    assert changed(rank, "gradient_checkpointing") == changed(rank, "compile") == list(BLOCKS)
    assert rank["losses"] == pytest.approx(said("blocks_are_sharded")[0]["losses"], rel=1e-5)


@pytest.mark.medium
def test_meta_modules_start_as_they_say(said: Said) -> None:
    for rank in said("made_on_the_meta_device"):
        assert rank["is_tied"]
        assert rank["std"] == pytest.approx(0.25, rel=0.2)
        assert rank["norm"] == pytest.approx([1.0] * 16, abs=0.1)  # one step from where a norm starts


@pytest.mark.medium
def test_meta_modules_start_alike_on_ranks_with_other_seeds(said: Said) -> None:
    first, second = said("made_on_the_meta_device")
    assert torch.equal(first["weights"], second["weights"])
    assert first["weights"].isfinite().all()


@pytest.mark.medium
def test_a_model_without_repetition_is_warned_about(said: Said) -> None:
    assert any("found no repeated blocks" in warning for warning in said("nothing_is_repeated")[0]["warnings"])


def test_a_text_is_no_list_of_blocks() -> None:
    with pytest.raises(TypeError, match=r"blocks='Block' is a text: give a list"):
        AccelFSDPStrategy(blocks="Block")


def test_a_misspelt_setting_is_refused() -> None:
    with pytest.raises(ValueError, match="AccelFSDPStrategy has no setting 'block'"):
        AccelFSDPStrategy(block=["Block"])


@pytest.mark.medium
@pytest.mark.parametrize(
    ("scenario", "complaint"),
    [
        ("a_module_without_parameters", "Empty has no parameters, so there is nothing to shard"),
        ("a_block_that_does_not_exist", "No block matches 'Blok'; did you mean 'Block'?"),
        ("a_block_is_not_called", "Either the weights of a block were used without calling it"),
        ("tensor_parallelism_of_nobody", "tensor_parallel_size=2 and no configure_model"),
        ("a_hook_on_a_gradient", "'net.head.weight' has a hook on its gradient, which would be lost"),
        ("two_dtypes_in_a_block", "'net.blocks.1.norm1.weight' is torch.float64 and 'net.blocks.1.norm2.weight' is"),
        ("another_precision_than_before", "sharded the module to be gathered in torch.bfloat16"),
        ("a_sparse_gradient", "'extra' is to get a sparse gradient"),
        ("ranks_that_run_other_blocks", "Rank 1 ran 'net.blocks.0' where rank 0 ran 'net.blocks.1'"),
        ("a_gradient_penalty", "Weights were needed after their block had given them back"),
        ("an_optimizer_that_shards_do_not_suit", "Torch has no form of this operation for sharded tensors"),
        ("accel_ddp_after_accel_fsdp", "An earlier run of accel_fsdp left"),
        ("shards_for_accel_ddp", "is a folder of shards, as accel_fsdp writes them"),
        ("shards_of_another_model", "is of another model:"),
        ("a_lazy_module", "'extra.weight' has no shape before its first batch"),
        ("a_meta_module_without_a_start", "'extra.scale' was made on the meta device, and nothing gives it a value"),
        ("a_parameter_of_a_manual_module_itself", "'extra' is a parameter of Manual itself"),
        ("a_checkpoint_of_another_model", 'Unexpected key(s) in state_dict: "net.blocks.2.norm1.weight"'),
        ("a_checkpoint_of_another_model", "The checkpoint is of another model: Error(s) in loading state_dict"),
    ],
)
def test_what_cannot_be_is_said_on_every_rank(said: Said, scenario: str, complaint: str) -> None:
    for rank in said(scenario):
        assert complaint in rank["error"]
