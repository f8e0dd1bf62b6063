"""`padding`: longer batches, whose padding nobody sees: the same losses and gradients, in fewer shapes."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel import Plan, accelerate
from lightning_accel.assembly import AcceleratedModel
from lightning_accel.core.host import Host
from lightning_accel.techniques.padding import IGNORED, multiple_for, padded, padded_length, why_not_padded

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.numbers, pytest.mark.filterwarnings("ignore:.*loss_type")]

CPU = Host(kind="cpu", device_name="a CPU")
GPU = Host(kind="cuda", device_name="a simulated GPU", capability=(8, 0))
VOCABULARY = 100


def batch_of(length: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Two sequences, the second of them half as long, with a label for each token."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCABULARY, (2, length), generator=random)
    mask = torch.ones_like(ids)
    mask[1, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def gpt() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_small()))


def roberta() -> nn.Module:
    """Its positions are counted from the tokens that are no padding."""
    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**_small(), pad_token_id=1))


def _small() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 66,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def handle_for(model: nn.Module, padding: Any, host: Host = CPU) -> AcceleratedModel:
    off = {"precision": "32-true", "flash_attention": "off", "inplace_activations": "off", "memory_format": "off"}
    handle = accelerate(model, Plan().replace(**off, trust="checked", padding=padding), host=host)
    with handle.step():
        batch = batch_of(5)
        assert handle.batch(batch) is batch  # until a step was seen to draw no random numbers
    return handle


@pytest.mark.parametrize("padding", [8, 64, "auto"])
@pytest.mark.parametrize("make", [gpt, bert, roberta])
def test_losses_and_gradients_are_those_without_padding(make: Any, padding: Any) -> None:
    model = make().double().train()
    batch = batch_of(37)

    def loss_and_gradients(given: Any) -> list[Tensor]:
        model.zero_grad()
        loss = model(**given).loss
        loss.backward()
        return [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    expected = loss_and_gradients(batch)
    handle = handle_for(model, padding)
    with handle.step():
        longer = handle.batch(batch)
        assert longer["input_ids"].shape[1] > 37
        found = loss_and_gradients(longer)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    handle.undo()


def test_lengths_become_fewer_and_so_do_compiled_graphs() -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    net = nn.Embedding(VOCABULARY, 4)
    call = torch.compile(net, backend=backend, dynamic=False)
    handle = handle_for(net, 16)
    for length in range(17, 49):
        with handle.step():
            call(handle.batch(batch_of(length))["input_ids"])
    assert len(compiled) == 2
    assert handle.report.of("padding").status.endswith("32 lengths → 2")
    handle.undo()
    torch._dynamo.reset()


def test_what_is_added_is_masked_ignored_and_comes_last() -> None:
    batch = batch_of(5) | {"token_type_ids": torch.ones(2, 5, dtype=torch.long), "weights": torch.ones(2)}
    longer = padded(batch, 8, pad_id=3)
    for name, fill in {"input_ids": 3, "attention_mask": 0, "labels": IGNORED, "token_type_ids": 0}.items():
        assert torch.equal(longer[name][:, :5], batch[name])
        assert (longer[name][:, 5:] == fill).all()
    assert longer["weights"] is batch["weights"]
    assert batch["input_ids"].shape == (2, 5)  # the user's own


def test_a_batch_of_a_tokenizer_stays_one() -> None:
    batch = transformers.BatchEncoding(batch_of(5))
    longer = padded(batch, 8, pad_id=0)
    assert isinstance(longer, transformers.BatchEncoding)
    assert longer.input_ids.shape == (2, 8)
    assert batch.input_ids.shape == (2, 5)


def test_where_steps_draw_random_numbers_nothing_is_padded() -> None:
    handle = handle_for(nn.Embedding(VOCABULARY, 4), 64)
    batch = batch_of(5)
    with handle.step():
        nn.functional.dropout(torch.ones(4), 0.5)
    assert handle.batch(batch, "train") is batch
    assert "draw random numbers" in handle.report.refused("padding")["batch"]
    handle.undo()


def test_labels_of_whole_sequences_stay() -> None:
    batch = {**batch_of(5), "labels": torch.tensor([0, 1])}
    assert padded(batch, 8, pad_id=0)["labels"] is batch["labels"]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_only_training_batches_are_padded(stage: str) -> None:
    handle = handle_for(nn.Linear(2, 2), 64)
    batch = batch_of(5)
    assert handle.batch(batch, stage) is batch
    handle.undo()


def test_a_batch_that_is_long_enough_is_the_very_same() -> None:
    handle = handle_for(nn.Linear(2, 2), 8)
    batch = batch_of(16)
    assert handle.batch(batch, "train") is batch
    handle.undo()


REFUSED = {
    "a tensor": (torch.ones(2, 5), "a batch is a mapping with input_ids"),
    "a tuple": ((batch_of(5), 1), "not of type tuple"),
    "no mask": ({"input_ids": torch.ones(2, 5)}, "without an attention_mask"),
    "a mask of pairs": ({**batch_of(5), "attention_mask": torch.ones(2, 1, 5, 5)}, "without an attention_mask"),
    "no classes": ({**batch_of(5), "labels": torch.ones(2, 5)}, "no classes"),
    "what is not known": ({**batch_of(5), "spans": torch.ones(2, 5)}, "'spans' of shape (2, 5)"),
    "positions of one row": ({**batch_of(5), "position_ids": torch.arange(5)[None]}, "'position_ids' of shape (1, 5)"),
    "positions without rows": ({**batch_of(5), "position_ids": torch.arange(5)}, "'position_ids' of shape (5,)"),
    "shares of classes": ({**batch_of(5), "labels": torch.ones(2, 5, 3)}, "'labels' of shape (2, 5, 3)"),
    "what is known": (batch_of(5), ""),
    "a mapping of another kind": (UserDict(batch_of(5)), ""),
}


@pytest.mark.parametrize(("batch", "why"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_padded_says_why(batch: Any, why: str) -> None:
    found = why_not_padded(batch)
    assert why in found
    assert bool(why) == bool(found)


def test_a_batch_that_is_left_is_in_the_report() -> None:
    handle = handle_for(nn.Linear(2, 2), 8)
    with handle.step():
        assert handle.batch(batch := {"input_ids": torch.ones(2, 5)}) is batch
    assert "without an attention_mask" in handle.report.refused("padding")["batch"]
    handle.undo()


class OwnPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(1, 40, 4))


@pytest.mark.parametrize("net", [nn.Embedding(40, 4), OwnPositions()])
def test_nothing_is_padded_beyond_the_positions_that_a_model_has(net: nn.Module) -> None:
    handle = handle_for(net, 16)
    assert handle.batch(batch_of(37), "train")["input_ids"].shape[1] == 37
    assert handle.batch(batch_of(30), "train")["input_ids"].shape[1] == 32
    handle.undo()


@pytest.mark.parametrize(
    ("length", "most", "multiple"),
    [(7, 64, 1), (16, 64, 2), (100, 64, 8), (600, 64, 64), (5000, 64, 64), (600, 16, 16)],
)
def test_auto_adds_an_eighth_at_most(length: int, most: int, multiple: int) -> None:
    assert multiple_for(length, most) == multiple
    assert padded_length(length, multiple) <= length * 9 / 8


def test_vocabularies_are_advised_on_a_gpu_and_stay() -> None:
    net = nn.Sequential(nn.Embedding(50257, 8), nn.Linear(8, 50304), nn.Linear(8, 10))
    handle = handle_for(net, "auto", GPU)
    refused = handle.report.refused("padding")
    assert list(refused) == ["0"]
    assert "a vocabulary of 50,257: products with 50,304 rows" in refused["0"]
    assert net[0].weight.shape == (50257, 8)
    handle.undo()
    handle = handle_for(net, "auto", CPU)
    assert handle.report.refused("padding") == {}
    handle.undo()


def test_heads_of_unlucky_sizes_are_in_the_report_though_nobody_asked_for_padding() -> None:
    net = nn.Sequential(nn.Embedding(50257, 8), nn.Linear(8, 50257), nn.Linear(8, 50304))
    handle = handle_for(net, "off", GPU)
    assert handle.report.of("loss").details.startswith("1 has a vocabulary of 50,257: products with 50,304 rows")
    assert "50,304:" not in handle.report.of("loss").details
    assert net[1].weight.shape == (50257, 8)
    handle.undo()


def test_grouping_by_length_is_for_loaders_of_a_trainer() -> None:
    handle = handle_for(nn.Linear(2, 2), {"multiple": 8, "group_by_length": True})
    assert handle.report.of("padding").status.endswith("; no loader of a Trainer to group by length")
    assert handle.batch(batch_of(5), "train")["input_ids"].shape[1] == 8
    handle.undo()
