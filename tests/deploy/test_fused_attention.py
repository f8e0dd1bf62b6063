"""Attention that a model spells out is one operation in a file, of the same numbers; else it is left alone."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node

from lightning_accel.core.report import AccelWarning
from lightning_accel.deploy import export
from lightning_accel.deploy.captured import Captured
from lightning_accel.deploy.forms import FORMS

pytestmark = pytest.mark.numbers

HEADS, DIM = 2, 16


def causal(scores: Tensor) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool).tril()


MASKS = {
    "none": lambda scores: scores,
    "masked_fill": lambda scores: scores.masked_fill(~causal(scores), -math.inf),
    "where": lambda scores: torch.where(causal(scores), scores, -math.inf),
    "added": lambda scores: scores + torch.zeros(scores.shape[-2:]).masked_fill(~causal(scores), -math.inf),
    "a large number": lambda scores: scores.masked_fill(~causal(scores), -1e9),
    # Without a query's own key: the first one sees none, and has NaN, or the mean of all values.
    "empty rows": lambda scores: scores.masked_fill(~causal(scores).tril(-1), -math.inf),
    "empty rows of a number": lambda scores: scores.masked_fill(~causal(scores).tril(-1), -1e9),
}
OTHERS = {
    "a small number": lambda scores: scores.masked_fill(~causal(scores), -50.0),
    "two masks": lambda scores: MASKS["masked_fill"](MASKS["added"](scores)),
    "scaled last": lambda scores: MASKS["added"](scores) * 0.5,
    "clamped": lambda scores: scores.clamp(-1, 1),
}


class Attention(nn.Module):
    """By hand: (B, T, D) → (B, T, D)."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.dropout = nn.Dropout(0.1)
        self.mask = (MASKS | OTHERS)[mask]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, dim=-1))
        scores = self.mask(q @ k.transpose(-2, -1) / math.sqrt(q.size(-1)))
        weights = self.dropout(scores.softmax(-1))
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Spellings(nn.Module):
    """Every one of them, on the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(Attention(mask) for mask in MASKS | OTHERS)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(one(x) for one in self.each)


def operations(model: nn.Module, path: Path) -> list[Counter[str]]:
    """What is behind each output in the file that is written of a model, which computes the same on other shapes."""
    exported = export(model, torch.randn(2, 6, DIM), "pt2", path=path)
    assert exported.dynamic == ("x: 0 (batch)", "x: 1 (sequence)")
    with torch.no_grad():
        x = torch.randn(3, 9, DIM)
        torch.testing.assert_close(exported.load()(x), model(x), equal_nan=True)
    (outputs,) = torch.export.load(path).graph.output_node().args
    targets = [[str(node.target) for node in behind(output)] for output in outputs]
    return [Counter(target.split(".")[1] for target in some if "." in target) for some in targets]


def behind(output: Node) -> set[Node]:
    """The calls that a result comes from."""
    found: set[Node] = set()
    left = [output]
    while left:
        node = left.pop()
        if node.op == "call_function" and node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counter[str]]:
    """The operations of each spelling."""
    found = operations(Spellings().eval(), tmp_path_factory.mktemp("spelled") / "model.pt2")
    return dict(zip(MASKS | OTHERS, found, strict=True))


@pytest.mark.medium
@pytest.mark.parametrize("mask", MASKS)
def test_attention_by_hand_is_one_operation(spelled: dict[str, Counter[str]], mask: str) -> None:
    assert spelled[mask]["scaled_dot_product_attention"] == 1
    assert spelled[mask]["softmax"] == spelled[mask]["matmul"] == 0


@pytest.mark.medium
@pytest.mark.parametrize("mask", OTHERS)
def test_what_is_not_quite_attention_stays_as_it_was_written(spelled: dict[str, Counter[str]], mask: str) -> None:
    assert spelled[mask]["scaled_dot_product_attention"] == 0
    assert spelled[mask]["softmax"] == 1


def test_attention_that_is_all_of_a_model_stays_as_it_was_written(tmp_path: Path) -> None:
    class Alone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            return (heads @ heads.transpose(-2, -1)).softmax(-1) @ heads

    (found,) = operations(Alone(), tmp_path / "model.pt2")
    assert found["softmax"] == 1


@pytest.mark.medium
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_attention_in_half_precision_is_one_operation_too(precision: str) -> None:
    exported = export(Attention("masked_fill"), torch.randn(2, 6, DIM), precision=precision)
    targets = [str(node.target) for node in torch.export.load(exported.path).graph.nodes]
    assert any("scaled_dot_product_attention" in target for target in targets)


@pytest.mark.medium
@pytest.mark.parametrize("form", ["onnx", "openvino"])
def test_other_forms_compute_the_same(form: str) -> None:
    pytest.importorskip({"onnx": "onnxruntime"}.get(form, form), reason="pip install it")
    model = Attention("masked_fill").eval()
    exported = export(model, torch.randn(2, 6, DIM), form)
    with torch.no_grad():
        x = torch.randn(3, 9, DIM)
        torch.testing.assert_close(exported.load()(x)[0], model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.medium
def test_where_a_form_cannot_take_the_operation_the_file_has_what_the_model_spells_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A form that raises on it is simulated: none of those that are here does."""
    form = FORMS["pt2"]

    def refuses(captured: Captured, path: Path) -> None:
        if "scaled_dot_product_attention" in str(captured.program.graph):
            raise RuntimeError("no kernel for attention")
        form.write(captured, path)

    monkeypatch.setitem(FORMS, "pt2", replace(form, write=refuses))
    with pytest.warns(AccelWarning, match="as the model spells it out: form='pt2' cannot hold this model.*no kernel"):
        (found,) = operations(Attention("none").eval(), tmp_path / "model.pt2")
    assert found["softmax"] == 1
