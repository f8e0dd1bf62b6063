"""The attention modules of transformers: which are found, which are refused or left to others, and why."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.techniques.flash_attention.backends import Sdpa
from lightning_accel.techniques.flash_attention.sites import HuggingFaceSite, find_huggingface, model_switches
from lightning_accel.techniques.site import Site
from support.huggingface_models import BATCH, LENGTH, VOCABULARY
from support.techniques.flash_attention.huggingface_runs import (
    BY_HAND,
    IS_4,
    MODES,
    assert_same,
    families,
    fused,
    make,
    registries_are_as_before,
    results,
    sites_of,
)
from support.techniques.flash_attention.recorder import Recorder

pytestmark = pytest.mark.numbers

transformers = pytest.importorskip("transformers")

__all__ = ["registries_are_as_before"]


VIT = "vit.encoder.layer.{}.attention.attention" if IS_4 else "vit.layers.{}.attention"  # in transformers 4, and since


# All six go through the interface in transformers 5.23; BERT and T5 did not in 4.57.
@families(
    ("gpt2", ["transformer.h.0.attn", "transformer.h.1.attn"]),
    ("bert", ["bert.encoder.layer.0.attention.self", "bert.encoder.layer.1.attention.self"]),
    ("vit", [VIT.format(i) for i in range(2)]),
    ("llama", ["model.layers.0.self_attn", "model.layers.1.self_attn"]),
    (
        "t5",
        [f"encoder.block.{i}.layer.0.SelfAttention" for i in range(2)]
        + [f"decoder.block.{i}.layer.{part}" for i in range(2) for part in ("0.SelfAttention", "1.EncDecAttention")],
    ),
    (
        "whisper",
        [f"model.encoder.layers.{i}.self_attn" for i in range(2)]
        + [f"model.decoder.layers.{i}.{part}" for i in range(2) for part in ("self_attn", "encoder_attn")],
    ),
)
def test_its_attention_modules_are_found(family: str, expected: list[str]) -> None:
    model, _ = make(family)

    found = list(find_huggingface(model))

    assert [each.site for each in found] == expected
    assert all(isinstance(each, HuggingFaceSite) and each.what == "transformers attention" for each in found)


def test_a_site_says_why_it_had_nothing_to_fuse() -> None:
    model, _ = make("gpt2")
    site = sites_of(model)[0]
    hidden = torch.randn(BATCH, LENGTH, 32)

    site.run(Sdpa(), type(site.module).forward, (hidden,), {})
    assert site.nothing_found() is None
    site.run(Sdpa(), type(site.module).forward, (hidden,), {"output_attentions": True})
    assert "weights are asked for" in str(site.nothing_found())
    site.run(Sdpa(), lambda module, x: x, (hidden,), {})
    assert "did not call transformers" in str(site.nothing_found())


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
def test_fused_models_are_refused(implementation: str) -> None:
    model, _ = make("llama")
    model.set_attn_implementation(implementation)

    found = list(find_huggingface(model))

    assert len(found) == 2
    for each in found:
        assert isinstance(each, Site)
        assert "fused already" in each.why_not
        assert implementation in each.why_not
    assert model_switches(model, {each.site for each in found}) == []


def test_a_model_set_to_another_attention_in_mid_run_is_let_be() -> None:
    model, batch = make("llama")

    with fused(model) as recording:
        model.set_attn_implementation("sdpa")
        model(**batch)

    assert not recording.calls
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.skipif("bert" in BY_HAND, reason="this transformers computes BERT's attention by hand")
def test_a_module_that_a_hook_listens_to_is_refused_but_for_transformers_own_hooks() -> None:
    model, batch = make("bert")
    model(**batch, output_attentions=True)  # has transformers put its hooks there
    assert len(sites_of(model)) == 2

    model.bert.encoder.layer[0].attention.self.register_forward_hook(lambda module, args, out: None)

    found = list(find_huggingface(model))
    assert [type(each) for each in found] == [Site, HuggingFaceSite]
    assert "hook" in found[0].why_not


def eager_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **options: Any
) -> tuple[Tensor, Tensor]:
    weights = module.attn_dropout((query @ key.mT * scaling).softmax(-1))
    return (weights @ value).transpose(1, 2), weights


class DropsByAModule(nn.Module):
    """As GPT-2's attention does in transformers 4."""

    def __init__(self) -> None:
        super().__init__()
        self.config = transformers.GPT2Config(attn_implementation="eager")
        self.proj, self.attn_dropout, self.is_causal = nn.Linear(8, 8), nn.Dropout(0.0), False

    def forward(self, x: Tensor) -> Tensor:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        x, name = self.proj(x)[:, None], self.config._attn_implementation
        attention = eager_attention_forward if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        return attention(self, x, x, x, None, scaling=1.0, dropout=0.0)[0]


@pytest.mark.parametrize(("part", "num_fused"), [("attn_dropout", 0), ("proj", 1)])
def test_a_hook_on_a_part_sees_it_called_by_eager_attention_too(part: str, num_fused: int) -> None:
    module, recorder, seen = DropsByAModule(), Recorder(), []
    getattr(module, part).register_forward_hook(lambda module, args, output: seen.append(output))
    (site,) = find_huggingface(module)
    assert isinstance(site, HuggingFaceSite)

    site.run(recorder, DropsByAModule.forward, (torch.randn(2, 3, 8),), {})

    assert len(seen) == 1
    assert len(recorder.calls) == num_fused


def test_without_transformers_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils")
    model = nn.TransformerEncoderLayer(16, 2)

    assert list(find_huggingface(model)) == []
    assert model_switches(model, set()) == []


def test_attention_that_transformers_wrote_by_hand_is_left_to_others() -> None:
    config = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=2)
    config._attn_implementation = "eager"

    assert list(find_huggingface(transformers.BloomModel(config))) == []


def test_attention_with_sinks_is_left_to_others() -> None:
    config = transformers.GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    config._attn_implementation = "eager"

    assert list(find_huggingface(transformers.GptOssModel(config))) == []


@MODES
def test_capped_scores_stay_eager_and_say_so(switched: bool) -> None:
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.Gemma2ForCausalLM._from_config(config, attn_implementation="eager")
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens}
    expected = results(model, batch)

    with fused(model, switched=switched) as recording:
        actual = results(model, batch)

    assert not recording.calls
    assert_same(actual, expected)
