"""Warnings are hidden without a trace: what was shown once is not shown again."""

from __future__ import annotations

import subprocess
import sys
import warnings

from lightning_accel.core.hidden_warnings import hidden_warnings, hide_warnings


def test_only_what_is_named_is_hidden_and_only_meanwhile() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with hidden_warnings("use the new"):
            warnings.warn("Use the new one", stacklevel=1)
            warnings.warn("another", stacklevel=1)
        warnings.warn("use the new one", stacklevel=1)
    assert [str(one.message) for one in said] == ["another", "use the new one"]


def test_filters_that_others_have_reset_stay_as_they_are() -> None:
    with warnings.catch_warnings():
        show = hide_warnings("anything")
        warnings.resetwarnings()
        before = list(warnings.filters)
        show()
        assert list(warnings.filters) == before


FIT = """
import warnings
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from unittest import mock
from lightning_accel import AccelPlugin
from lightning_accel.core.host import Host

class Warns(BoringModel):
    def training_step(self, batch, batch_idx):
        warnings.warn("said once")
        return super().training_step(batch, batch_idx)

host = Host(kind="cpu", device_name="a CPU with bfloat16", native_bf16=True)
data = torch.utils.data.DataLoader(torch.randn(16, 32), 4)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
with mock.patch.object(Host, "detect", return_value=host):
    for _ in range(2):
        plugin = AccelPlugin(trust="checked")
        Trainer(plugins=[plugin], max_epochs=3, accelerator="cpu", **quiet).fit(Warns(), data, data)
        assert plugin.report.of("matmul_precision").is_on
"""


def test_a_run_has_no_warning_of_the_users_shown_again() -> None:
    done = subprocess.run([sys.executable, "-c", FIT], capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr.count("UserWarning: said once") == 1
