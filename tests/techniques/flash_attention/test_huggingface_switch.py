"""The switch of a model's config to this package's attention: fewer masks, only where safe, and nothing left behind."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_accel.techniques.flash_attention.backends import Sdpa
from lightning_accel.techniques.flash_attention.call import AttentionCall
from lightning_accel.techniques.flash_attention.sites import model_switches
from support.techniques.flash_attention.huggingface_runs import (
    FAMILIES,
    IS_4,
    MODES,
    assert_same,
    fused,
    make,
    registered_names,
    registries_are_as_before,
    results,
    sites_of,
)

pytestmark = pytest.mark.numbers
switches = pytest.mark.skipif(IS_4, reason="transformers 4 warns of a config that says our name: none is switched")

pytest.importorskip("transformers")

__all__ = ["registries_are_as_before"]


@switches
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_switched_causal_model_builds_no_mask(family: str) -> None:
    model, batch = make(family)
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    expected = results(model, batch)

    with fused(model, switched=True) as recording:
        actual = results(model, batch)

    assert all(call.mask is None and call.is_causal for call in recording.calls)
    assert_same(actual, expected)


@switches
def test_a_switched_model_passes_padding_on_as_padding() -> None:
    model, batch = make("bert")

    with fused(model, switched=True) as recording:
        model(**batch)

    for call in recording.calls:
        assert call.key_padding is not None
        assert torch.equal(call.key_padding, batch["attention_mask"].bool())


def test_weights_asked_for_in_the_config_are_returned_and_forbid_the_switch() -> None:
    model, batch = make("bert")
    model.config.output_attentions = True
    sites = sites_of(model)

    with fused(model, switched=True) as recording:
        out = model(**batch)

    assert not recording.calls
    assert len(out.attentions) == 2
    assert model_switches(model, {site.site for site in sites}) == []


@switches
@pytest.mark.parametrize("family", FAMILIES)
def test_undo_leaves_no_trace(family: str) -> None:
    model, batch = make(family)
    model(**batch)  # transformers notes things in a config at the first call
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    before = [dict(vars(config)) for config in configs]

    with fused(model, switched=True):
        model(**batch)
        assert any("lightning_accel" in names for names in registered_names())

    assert [dict(vars(config)) for config in configs] == before
    assert all(type(config._attn_implementation) is str for config in configs)
    assert not any("accel" in name for module in model.modules() for name in vars(module))


@MODES
def test_an_exception_restores_everything(switched: bool) -> None:
    model, batch = make("gpt2")

    class Failing(Sdpa):
        @override
        def __call__(self, call: AttentionCall) -> Tensor:
            raise RuntimeError("no kernel")

    with fused(model, switched=switched, backend=Failing()):
        with pytest.raises(RuntimeError, match="no kernel"):
            model(**batch)
        assert not any("accel" in name for module in model.modules() for name in vars(module))
        assert (model.config._attn_implementation == "eager") is not switched

    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_it_is_saved_or_copied(family: str, tmp_path: Path) -> None:
    model, batch = make(family)

    with fused(model, switched=True):
        model.save_pretrained(tmp_path / "model")
        configs = [module.config for module in model.modules() if hasattr(module, "config")]
        for config in configs:
            assert "lightning_accel" not in str(config.to_dict()) + config.to_json_string(use_diff=False)
            assert pickle.loads(pickle.dumps(config))._attn_implementation == "eager"
        twin = copy.deepcopy(model)
        for module in twin.modules():
            vars(module).pop("forward", None)  # of the test's own dispatcher

    for file in (tmp_path / "model").iterdir():
        assert b"lightning_accel" not in file.read_bytes()
    assert_same(results(twin, batch), results(model, batch))


def test_a_model_built_from_a_switched_models_config_is_an_eager_one() -> None:
    model, batch = make("llama")

    with fused(model, switched=True):
        other = type(model)._from_config(model.config)

    assert other.config._attn_implementation == "eager"
    other(**batch)


@switches
def test_only_a_config_all_of_whose_modules_were_kept_is_switched() -> None:
    model, _ = make("t5")
    kept = {site.site for site in sites_of(model)}

    assert [switch.site for switch in model_switches(model, kept)] == ["encoder", "decoder"]
    without_one = kept - {"decoder.block.0.layer.1.EncDecAttention"}
    assert [switch.site for switch in model_switches(model, without_one)] == ["encoder"]
    assert model_switches(model, set()) == []
    # Masks are built by a model's config; blocks alone are given theirs.
    blocks = nn.ModuleList(model.encoder.block)
    assert model_switches(blocks, {site.site for site in sites_of(blocks)}) == []


def test_a_module_seen_to_attend_to_all_keys_without_a_mask_forbids_the_switch() -> None:
    model, _ = make("llama")
    site = sites_of(model)[0]
    hidden = torch.randn(1, 6, 32)
    rotary = model.model.rotary_emb(hidden, torch.arange(6)[None])
    forward = type(site.module).forward
    expected, _ = forward(site.module, hidden, rotary, None)

    actual, _ = site.run(Sdpa(), forward, (hidden, rotary, None), {})

    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert model_switches(model, {each.site for each in sites_of(model)}) == []


@pytest.mark.skipif(not IS_4, reason="for transformers 4")
def test_transformers_4_is_not_switched_and_has_nothing_to_warn_of() -> None:
    model, batch = make("llama")
    assert model_switches(model, {site.site for site in sites_of(model)}) == []
    with fused(model, switched=True) as recording:
        model(**batch)
        model(**batch, output_attentions=True)
    assert len(recording.calls) == 2
