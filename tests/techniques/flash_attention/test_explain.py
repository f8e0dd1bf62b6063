"""``explain`` says what was captured of a model, what matched, and the first thing that did not; it changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.techniques.flash_attention import explain
from support.attention_lookalikes import LEFT_ALONE
from support.attention_zoo import FOUND

pytestmark = pytest.mark.numbers


class Model(nn.Module):
    """Three layers: attention of the same code twice, and something that only looks like it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (FOUND["causal_buffer"](dropout=0.1) for _ in range(2))
        self.capped = LEFT_ALONE["soft_capped"][0]()
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.capped(self.second(self.first(x))).mT)


def test_it_tells_what_matched_and_the_first_thing_that_did_not() -> None:
    paragraphs = paragraphs_of(explain(Model(), torch.randn(2, 8, 32)))
    assert paragraphs["first (causal_buffer)"][1:] == [
        "attention: query @ key → times 0.3536 → -inf where `eq` is True → softmax → dropout 0.1 → @ value"
    ]
    assert paragraphs["second (causal_buffer)"] == paragraphs["first (causal_buffer)"]
    assert paragraphs["capped (soft_capped)"][-1] == (
        "left alone: `tanh` stands between its first product and the softmax"
    )


def test_it_shows_the_line_of_code_that_a_softmax_stands_in() -> None:
    (line,) = [line for line in explain(Model(), torch.randn(2, 8, 32)).splitlines() if "tanh(" in line]
    assert "attention_lookalikes.py:" in line
    assert line.endswith("`return self.merge((50 * torch.tanh(q @ k.transpose(-1, -2) / 50)).softmax(-1) @ v)`")


def test_without_inputs_it_names_the_places_and_asks_for_them() -> None:
    paragraphs = paragraphs_of(explain(Model()))
    assert len(paragraphs) == 3
    assert all("give explain() the inputs of a call" in lines[0] for lines in paragraphs.values())


def test_attention_that_says_what_it_is_needs_no_capture() -> None:
    assert "nn.MultiheadAttention: taken at its word" in explain(nn.MultiheadAttention(32, 4))


def test_a_module_without_attention_is_told_so() -> None:
    assert explain(nn.Linear(2, 2), torch.ones(1, 2)).startswith("no attention")


def test_a_softmax_that_no_product_leads_to_is_told_so() -> None:
    class Gated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.softmax(-1) @ x.mT

    assert "left alone: no matrix product leads to its softmax" in explain(Gated(), torch.randn(2, 3))


def test_an_error_of_the_model_comes_out_and_nothing_stays_behind() -> None:
    model = Model()
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        explain(model, torch.randn(2, 8, 31))
    assert not any("forward" in vars(module) for module in model.modules())


def test_nothing_is_left_of_it() -> None:
    model = Model()
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    explain(model, torch.randn(2, 8, 32, generator=torch.Generator()))
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any("forward" in vars(module) for module in model.modules())


def paragraphs_of(text: str) -> dict[str, list[str]]:
    """The lines below each site's name."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith(" "):
            list(found.values())[-1].append(line.strip())
        else:
            found[line] = []
    return found
