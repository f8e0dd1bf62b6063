"""Programs that put a class of their own in the place of ``torch.nn.MultiheadAttention``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_accel import FlashMultiheadAttention, Plan, accelerate
from support.scripts import run_script

pytestmark = pytest.mark.numbers


class Counting(nn.MultiheadAttention):
    """Counts its calls, and leaves the rest to torch."""

    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("replacement", [FlashMultiheadAttention, Counting])
@pytest.mark.parametrize("need_weights", [False, True])
def test_torchs_own_computation_is_found_when_its_name_means_another(
    monkeypatch: pytest.MonkeyPatch, replacement: Any, need_weights: bool
) -> None:
    """What the fused form leaves to torch, weights that are read for one, came back to it without end."""
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(8, 2, batch_first=True)
    monkeypatch.setattr(nn, "MultiheadAttention", replacement)
    attn = FlashMultiheadAttention(8, 2, batch_first=True)
    attn.load_state_dict(plain.state_dict())
    x = torch.randn(2, 5, 8)
    expected, actual = plain(x, x, x, need_weights=need_weights), attn(x, x, x, need_weights=need_weights)
    torch.testing.assert_close(actual, expected)


def test_modules_are_known_for_what_they_are_when_their_name_means_another(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theirs, self.torchs = Counting(8, 2, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.theirs(x, x, x, need_weights=False)[0]
            return x + self.torchs(x, x, x, need_weights=False)[0]

    model = Model()
    monkeypatch.setattr(nn, "MultiheadAttention", Counting)
    handle = accelerate(model, Plan(precision="32-true", techniques={"flash_attention": "sdpa"}))
    with handle.step():
        loss = model(torch.randn(2, 5, 8)).sum()
    loss.backward()
    assert handle.report.applied("flash_attention") == ["torchs"]
    assert "forward pass of its own" in handle.report.of("flash_attention").refusals["theirs"]
    assert model.theirs.calls == 1
    handle.undo()


REPLACED_FIRST = """
import sys
import torch
from torch import nn

assert "lightning_accel" not in sys.modules

class Mine(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)

nn.MultiheadAttention = Mine
from lightning_accel import FlashMultiheadAttention

x = torch.randn(2, 5, 8)
out, weights = FlashMultiheadAttention(8, 2, batch_first=True)(x, x, x)
assert not issubclass(FlashMultiheadAttention, Mine)
print(tuple(out.shape), tuple(weights.shape))
"""


def test_a_class_that_was_there_before_is_no_base_of_ours(tmp_path: Path) -> None:
    script = tmp_path / "replaced_first.py"
    script.write_text(REPLACED_FIRST)
    assert run_script(script, tmp_path, timeout_s=120).splitlines()[-1] == "(2, 5, 8) (2, 5, 5)"
