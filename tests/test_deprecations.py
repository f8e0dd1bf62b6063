"""What torch, Python or another library calls deprecated fails a test where our own code calls it."""

from __future__ import annotations

import warnings

import pytest

IGNORED = "`torch.jit.script` is deprecated"  # of others: by a line of pyproject.toml


def warn(category: type[Warning], module: str) -> None:
    warnings.warn_explicit(IGNORED, category, f"{module}.py", 1, module=module, registry={})


@pytest.mark.parametrize("category", [DeprecationWarning, FutureWarning])
@pytest.mark.parametrize("module", ["lightning_accel.core.host", "lightning_accel.callbacks"])
def test_our_own_code_calls_nothing_that_is_deprecated(category: type[Warning], module: str) -> None:
    with pytest.raises(category):
        warn(category, module)


def test_what_others_call_is_theirs_to_mend() -> None:
    warn(FutureWarning, "somebody.model")


def test_an_export_to_torchscript_is_torchscript() -> None:
    warn(FutureWarning, "lightning_accel.deploy.forms")
