"""What a checkpoint keeps of trials: verdicts, and what was measured for them."""

from __future__ import annotations

from lightning_accel.core.measured import Measurement
from lightning_accel.lightning.met_programs import RunState
from lightning_accel.techniques.technique_context import Verdict


def test_figures_travel_in_checkpoints_with_their_verdicts() -> None:
    measured = Measurement(error=1e-6, spread=2e-6, is_same=False)
    decisions = {"flash_attention": {"attention": Verdict("kept", "2.0x", measured=measured)}}
    assert RunState().load(RunState(decisions=decisions).to_dict()) == decisions
