"""Attention of transformers, through its own interface: what the models compute stays, wherever they are run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_accel.techniques.flash_attention.backend_trial import Rehearsal, WatchedBackend
from lightning_accel.techniques.flash_attention.backends import Sdpa
from support.huggingface_models import BATCH, LENGTH
from support.techniques.flash_attention.huggingface_runs import (
    BY_HAND,
    FAMILIES,
    MODES,
    assert_same,
    families,
    fused,
    make,
    registries_are_as_before,
    results,
    sites_of,
)

pytestmark = pytest.mark.numbers

transformers = pytest.importorskip("transformers")

__all__ = ["registries_are_as_before"]


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
@families("gpt2", "llama", "bert", "t5")
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
    model, batch = make("llama")  # in transformers 4, GPT-2's layers have a mask each
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


@MODES
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_computed_again_the_same_way(switched: bool, reentrant: bool) -> None:
    model, batch = make("gpt2")
    batch["use_cache"] = False
    expected = results(model, batch)
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})

    with fused(model, switched=switched) as recording:
        actual = results(model, batch)

    assert len(recording.calls) == 4
    assert_same(actual, expected)
    assert model.config._attn_implementation == "eager"


@MODES
@families("gpt2", "llama", "t5")
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
@families("gpt2", "llama", "t5", "whisper")
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


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # of GPT-2's, by older callers
def test_a_rehearsal_adds_to_a_cache_what_the_call_itself_adds() -> None:
    model, _ = make("gpt2")
    site = sites_of(model)[0]
    hidden = torch.randn(1, 6, 32)
    forward = type(site.module).forward
    decoder_only = transformers.DynamicCache()
    both = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())

    for cache in (decoder_only, both):
        rehearsal = Rehearsal([WatchedBackend(Sdpa())], by_clock=False)
        site.run(rehearsal, forward, (hidden,), {"past_key_values": cache})
        assert rehearsal.verdict("all", site.nothing_found()).choices == {"all": "sdpa"}
        assert cache.get_seq_length() == 6


# In transformers 4.57 torch itself makes a Function within what Dynamo captures.
@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("family", "switched"), [("bert", False), ("llama", True)], ids=["by call", "switched"])
def test_it_compiles_to_one_graph_with_the_same_outputs_for_queries_that_see_no_key(
    family: str, switched: bool
) -> None:
    if family in BY_HAND:
        pytest.skip(f"this transformers computes the attention of {family} by hand")
    model, batch = make(family)
    batch["attention_mask"] = batch["attention_mask"].flip(1)
    if family == "bert":
        batch["attention_mask"][1] = 0
    del batch["labels"]
    expected = model(**batch).logits

    with fused(model, switched=switched, backend=Sdpa()):
        torch._dynamo.reset()
        # In torch 2.11 Dynamo breaks its graph at methods of names that are strings by inheritance.
        fullgraph = torch.__version__ >= (2, 12)
        actual = torch.compile(model, backend="eager", fullgraph=fullgraph)(**batch).logits
    torch._dynamo.reset()

    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
