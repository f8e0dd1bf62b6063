"""What to change in a run that waits for its data: said once, by all ranks together."""

from __future__ import annotations

from lightning_accel.callbacks._announcements import say
from lightning_accel.callbacks._header import makes_loaders
from lightning_accel.core.host import usable_cores
from lightning_accel.core.tree import leaves
from lightning_accel.data.advice import WORTH_ADVICE, waiting_advice
from lightning_accel.evidence.epoch_speed import EpochSpeed
from lightning_accel.lightning.packages import Trainer


def advise(trainer: Trainer, speed: EpochSpeed, *, has_images: bool) -> bool:
    """Says it, if an interval has waited long enough; whether it has."""
    if speed.data_wait_frac is None or speed.data_wait_frac <= WORTH_ADVICE:
        return False
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return False  # of a batch, nothing can be told
    if speed.world_size != trainer.world_size:
        return False  # the ranks are not here together to hear what rank 0 has to say
    lines = waiting_advice(
        leaves(trainer.train_dataloader),
        speed.data_wait_frac,
        trainer.strategy.root_device,
        preprocesses=bool(getattr(getattr(trainer.precision_plugin, "plan", None), "preprocess", ())),
        cores=usable_cores(),
        makes_loaders=makes_loaders(trainer),
        has_images=has_images,
    )
    # The wait is that of all ranks, but each times and sets up loaders of its own: what is said is of one run.
    if lines := trainer.strategy.broadcast(lines):
        say(trainer, *lines)
    return True
