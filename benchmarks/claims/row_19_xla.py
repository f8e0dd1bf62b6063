"""XLA/TPU: the same code.

Claimed: runs
Holds: in a loop of one's own, where autocast is all that XLA leaves to be done; Lightning's strategies for XLA take no
    AccelPlugin, and AccelXLAPlugin in its place
Holds when: the losses of the other precision are not those of a plain run
No longer holds: the losses are not those of a plain run

Trained there, plain and accelerated; the losses are compared.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from lightning_accel.claims.claim import Figure, NotHereError, claim_in
from lightning_accel.claims.row_18_rocm import same_losses
from lightning_accel.core.host import Host

CLAIM = claim_in(__doc__, row=19)


def measure() -> Iterator[Figure]:
    if not Host.detect("xla").device_name.startswith("TPU"):
        raise NotHereError(
            "needs a TPU, and a torch_xla for torch 2.11 or newer (on PyPI there is 2.9); until one is at hand"
            " AccelXLAPlugin trains on XLA's CPU device, with torch 2.9 (docs/xla.md), and TPUs are simulated, in the"
            " tests and in docs/hosts.md"
        )
    torch_xla = importlib.import_module("torch_xla")
    yield from same_losses(torch_xla.device(), end_of_step=torch_xla.sync)
