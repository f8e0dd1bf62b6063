"""Attention of transformers, through its own interface: the same numbers, fewer masks, and nothing left behind."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

transformers = pytest.importorskip("transformers")

from huggingface_models import BATCH, LENGTH, VOCABULARY, tiny_models  # noqa: E402
from lightning_accel.patch import MethodPatch, PatchSet  # noqa: E402
from lightning_accel.techniques.base import Refusal  # noqa: E402
from lightning_accel.techniques.flash_attention.backends import Backend, Sdpa  # noqa: E402
from lightning_accel.techniques.flash_attention.call import AttentionCall  # noqa: E402
from lightning_accel.techniques.flash_attention.huggingface import (  # noqa: E402
    HuggingFaceSite,
    find_huggingface,
    model_switches,
)

FAMILIES = list(tiny_models())
MODES = pytest.mark.parametrize("switched", [False, True], ids=["by call", "switched"])


class Recording(Sdpa):
    """Torch's attention, with a note of every call."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    @override
    def __call__(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        return super().__call__(call)


@pytest.fixture(autouse=True)
def _registries_are_as_before() -> Iterator[None]:
    before = _registered_names()
    yield
    assert _registered_names() == before


def _registered_names() -> list[set[str]]:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    return [set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)]


def sites_of(model: nn.Module) -> list[HuggingFaceSite]:
    return [found for found in find_huggingface(model) if isinstance(found, HuggingFaceSite)]


@contextmanager
def fused(model: nn.Module, *, switched: bool = False, backend: Backend | None = None) -> Iterator[Recording]:
    """The model with every site on ``backend``, bound over forward as the technique does."""
    recording = Recording()
    patches = PatchSet()
    for site in sites_of(model):

        def wrap(original: Any, site: HuggingFaceSite = site) -> Any:
            def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return site.fused(backend or recording, original, args, kwargs)

            return forward

        patches.add(MethodPatch(f"{site.site}.forward", "fused", site.module, "forward", wrap))
    if switched:
        for switch in model_switches(model, {site.site for site in sites_of(model)}):
            patches.add(switch)
    patches.apply()
    try:
        yield recording
    finally:
        patches.undo()


def make(family: str) -> tuple[nn.Module, dict[str, Tensor]]:
    factory, batch = tiny_models()[family]
    torch.manual_seed(0)
    return factory(), batch()


def results(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits, loss and every gradient of one step."""
    model.zero_grad()
    out = model(**batch)
    out.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": out.logits.detach(), "loss": out.loss.detach(), **gradients}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


# All six go through the interface in transformers 5.23; T5 did not in 4.57.
@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("gpt2", ["transformer.h.0.attn", "transformer.h.1.attn"]),
        ("bert", ["bert.encoder.layer.0.attention.self", "bert.encoder.layer.1.attention.self"]),
        ("vit", ["vit.layers.0.attention", "vit.layers.1.attention"]),
        ("llama", ["model.layers.0.self_attn", "model.layers.1.self_attn"]),
        (
            "t5",
            [f"encoder.block.{i}.layer.0.SelfAttention" for i in range(2)]
            + [
                f"decoder.block.{i}.layer.{part}" for i in range(2) for part in ("0.SelfAttention", "1.EncDecAttention")
            ],
        ),
        (
            "whisper",
            [f"model.encoder.layers.{i}.self_attn" for i in range(2)]
            + [f"model.decoder.layers.{i}.{part}" for i in range(2) for part in ("self_attn", "encoder_attn")],
        ),
    ],
)
def test_its_attention_modules_are_found(family: str, expected: list[str]) -> None:
    model, _ = make(family)

    found = list(find_huggingface(model))

    assert [each.site for each in found] == expected
    assert all(isinstance(each, HuggingFaceSite) and each.what == "transformers attention" for each in found)


@MODES
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_eager_attention(family: str, switched: bool) -> None:
    model, batch = make(family)
    expected = results(model, batch)

    with fused(model, switched=switched) as recording:
        actual = results(model, batch)

    assert len(recording.calls) == len(sites_of(model))
    assert_same(actual, expected)


@MODES
@pytest.mark.parametrize("family", FAMILIES)
def test_a_few_steps_of_training_end_at_the_same_weights(family: str, switched: bool) -> None:
    plain, batch = make(family)
    model = copy.deepcopy(plain)

    def train(which: nn.Module) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(which.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            which(**batch).loss.backward()
            optimizer.step()
        return {name: value.detach().clone() for name, value in which.state_dict().items()}

    expected = train(plain)
    with fused(model, switched=switched):
        actual = train(model)

    assert_same(actual, expected)


@MODES
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5"])
def test_queries_that_see_no_key_are_as_in_eager_attention(family: str, switched: bool) -> None:
    model, batch = make(family)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, :5] = 0  # padded on the left: the first five tokens of a causal model see nothing
    if family in ("bert", "t5"):
        mask[1] = 0
    batch["attention_mask"] = mask
    batch["labels"] = batch["input_ids"]
    expected = results(model, batch)

    with fused(model, switched=switched):
        actual = results(model, batch)

    assert_same(actual, expected)


@MODES
def test_a_mask_is_read_once_for_all_layers(switched: bool) -> None:
    model, batch = make("gpt2")
    batch["attention_mask"] = batch["attention_mask"].flip(1)

    class Reads(TorchDispatchMode):
        count = 0

        @override
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += function is torch.ops.aten.nonzero.default
            return function(*args, **(kwargs or {}))

    with fused(model, switched=switched) as recording, Reads() as reads:
        model(**batch)

    assert len(recording.calls) == 2
    assert reads.count == 1


@MODES
def test_masks_of_the_users_own_keep_their_nan(switched: bool) -> None:
    model, batch = make("llama")
    mask = torch.full((BATCH, 1, LENGTH, LENGTH), -torch.inf).triu(1)
    mask[1, :, 3] = -torch.inf
    batch["attention_mask"] = mask
    expected = model(**batch).logits

    with fused(model, switched=switched):
        actual = model(**batch).logits

    assert expected[1].isnan().any()
    assert expected[0].isfinite().all()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_mask_that_was_changed_in_place_is_read_again() -> None:
    model, batch = make("llama")
    mask = batch["attention_mask"] = torch.full((BATCH, 1, LENGTH, LENGTH), -1e9).triu(1)
    with fused(model):
        model(**batch)
        mask[1, :, :4] = -1e9
        actual = results(model, batch)

    assert_same(actual, results(model, batch))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_switched_causal_model_builds_no_mask(family: str) -> None:
    model, batch = make(family)
    batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
    expected = results(model, batch)

    with fused(model, switched=True) as recording:
        actual = results(model, batch)

    assert all(call.mask is None and call.is_causal for call in recording.calls)
    assert_same(actual, expected)


def test_a_switched_model_passes_padding_on_as_padding() -> None:
    model, batch = make("bert")

    with fused(model, switched=True) as recording:
        model(**batch)

    for call in recording.calls:
        assert call.key_padding is not None
        assert torch.equal(call.key_padding, batch["attention_mask"].bool())


@MODES
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_weights_are_returned_when_asked_for(family: str, switched: bool) -> None:
    model, batch = make(family)
    model.eval()
    expected = model(**batch, output_attentions=True)

    with fused(model, switched=switched) as recording:
        actual = model(**batch, output_attentions=True)
        assert not recording.calls

    names = [name for name in expected if name.endswith("attentions")]
    assert names
    for name in names:
        assert len(actual[name]) == len(expected[name])
        for one, other in zip(actual[name], expected[name], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_weights_asked_for_in_the_config_are_returned_and_forbid_the_switch() -> None:
    model, batch = make("bert")
    model.config.output_attentions = True
    sites = sites_of(model)

    with fused(model, switched=True) as recording:
        out = model(**batch)

    assert not recording.calls
    assert len(out.attentions) == 2
    assert model_switches(model, {site.site for site in sites}) == []


def test_a_site_says_why_it_had_nothing_to_fuse() -> None:
    model, _ = make("gpt2")
    site = sites_of(model)[0]
    hidden = torch.randn(BATCH, LENGTH, 32)

    site.fused(Sdpa(), type(site.module).forward, (hidden,), {})
    assert site.nothing_found() is None
    site.fused(Sdpa(), type(site.module).forward, (hidden,), {"output_attentions": True})
    assert "weights are asked for" in str(site.nothing_found())
    site.fused(Sdpa(), lambda module, x: x, (hidden,), {})
    assert "did not come to call" in str(site.nothing_found())


@pytest.mark.parametrize("family", FAMILIES)
def test_undo_leaves_no_trace(family: str) -> None:
    model, batch = make(family)
    model(**batch)  # transformers notes things in a config at the first call
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    before = [dict(vars(config)) for config in configs]

    with fused(model, switched=True):
        model(**batch)
        assert any("lightning_accel" in names for names in _registered_names())

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


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention"])
def test_fused_models_are_refused(implementation: str) -> None:
    model, _ = make("llama")
    model.set_attn_implementation(implementation)

    found = list(find_huggingface(model))

    assert len(found) == 2
    for each in found:
        assert isinstance(each, Refusal)
        assert "fused already" in each.reason
        assert implementation in each.reason
    assert model_switches(model, {each.site for each in found}) == []


def test_a_model_set_to_another_attention_in_mid_run_is_let_be() -> None:
    model, batch = make("llama")

    with fused(model) as recording:
        model.set_attn_implementation("sdpa")
        model(**batch)

    assert not recording.calls
    assert model.config._attn_implementation == "sdpa"


def test_a_module_that_a_hook_listens_to_is_refused_but_for_transformers_own_hooks() -> None:
    model, batch = make("bert")
    model(**batch, output_attentions=True)  # has transformers put its hooks there
    assert len(sites_of(model)) == 2

    model.bert.encoder.layer[0].attention.self.register_forward_hook(lambda module, args, out: None)

    found = list(find_huggingface(model))
    assert [type(each) for each in found] == [Refusal, HuggingFaceSite]
    assert "hook" in found[0].reason


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
    expected, _ = forward(site.module, hidden, rotary)

    actual, _ = site.fused(Sdpa(), forward, (hidden, rotary), {})

    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert model_switches(model, {each.site for each in sites_of(model)}) == []


@MODES
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_computed_again_the_same_way(switched: bool, reentrant: bool) -> None:
    model, batch = make("gpt2")
    batch["use_cache"] = False
    expected = results(model, batch)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})

    with fused(model, switched=switched) as recording:
        actual = results(model, batch)

    assert len(recording.calls) == 4
    assert_same(actual, expected)
    assert model.config._attn_implementation == "eager"


@MODES
@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_under_autocast_it_is_as_near_to_float32_as_eager_attention(family: str, switched: bool) -> None:
    model, batch = make(family)
    batch["attention_mask"][1, :5] = 0  # unseeing queries: the lowest float32 must not become -inf, and NaN
    oracle = results(model, batch)["logits"]
    with torch.autocast("cpu", torch.bfloat16):
        eager = results(model, batch)["logits"]

    with fused(model, switched=switched), torch.autocast("cpu", torch.bfloat16):
        actual = results(model, batch)

    assert all(value.isfinite().all() for value in actual.values())
    assert actual["logits"].dtype == eager.dtype
    assert (actual["logits"] - oracle).abs().max() <= 2 * (eager - oracle).abs().max()


def test_dropout_is_for_training_only() -> None:
    model, batch = make("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.25

    with fused(model) as recording:
        model(**batch)
        model.eval()(**batch)

    assert [call.dropout_p for call in recording.calls] == [0.25, 0.25, 0.0, 0.0]


@MODES
@pytest.mark.parametrize("family", ["gpt2", "llama", "t5", "whisper"])
def test_generation_with_a_cache_says_the_same(family: str, switched: bool) -> None:
    model, batch = make(family)
    model.eval()
    del batch["labels"]
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    if family in ("gpt2", "llama"):
        batch["attention_mask"] = batch["attention_mask"].flip(1)
    expected = model.generate(**batch, **options)

    with fused(model, switched=switched) as recording:
        actual = model.generate(**batch, **options)

    assert recording.calls
    assert torch.equal(actual, expected)


def test_a_cache_is_left_alone_by_calls_with_repeatable_arguments() -> None:
    model, _ = make("gpt2")
    site = sites_of(model)[0]
    hidden = torch.randn(1, 6, 32)
    forward = type(site.module).forward
    decoder_only = transformers.DynamicCache()
    both = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())

    for cache in (decoder_only, both):
        outputs = []
        for _ in range(3):
            args, kwargs = site.repeatable((hidden,), {"past_key_values": cache})
            outputs.append(site.judged(site.fused(Sdpa(), forward, args, kwargs)))
        assert cache.get_seq_length() == 0
        assert torch.equal(outputs[0], outputs[2])
        forward(site.module, hidden, past_key_values=cache)
        assert cache.get_seq_length() == 6


@MODES
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_it_compiles_to_one_graph_with_the_same_outputs_for_queries_that_see_no_key(
    family: str, switched: bool
) -> None:
    model, batch = make(family)
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    if family == "bert":
        batch["attention_mask"][1] = 0
    del batch["labels"]
    expected = model(**batch).logits

    with fused(model, switched=switched, backend=Sdpa()):
        torch._dynamo.reset()
        actual = torch.compile(model, backend="eager", fullgraph=True)(**batch).logits
    torch._dynamo.reset()

    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
