"""The precision that suits a device, and the autocast region."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_accel.assembly import accelerate
from lightning_accel.core.host import Host
from lightning_accel.core.report import AccelError, AccelWarning
from lightning_accel.settings import Plan
from lightning_accel.techniques.mixed_precision import (
    PrecisionSetting,
    resolve_precision,
    without_mha_fast_path,
)

A100 = Host(kind="cuda", device_name="A100", capability=(8, 0), native_bf16=True)
T4 = Host(kind="cuda", device_name="T4", capability=(7, 5))
MI300 = Host(kind="rocm", device_name="MI300", native_bf16=True)
XEON = Host(kind="cpu", device_name="Xeon", native_bf16=True)
OLD_CPU = Host(kind="cpu", device_name="Core 2")
M1 = Host(kind="mps", device_name="M1")
TPU = Host(kind="xla", device_name="TPU")


@pytest.mark.parametrize(
    ("setting", "host", "precision", "reason"),
    [
        ("auto", A100, "bf16-mixed", "natively"),
        ("auto", MI300, "bf16-mixed", "natively"),
        ("auto", T4, "16-mixed", "gradient scaler"),
        ("auto", XEON, "bf16-mixed", "natively"),
        ("auto", OLD_CPU, "32-true", "neither AMX nor a fast AVX512-BF16"),
        ("auto", M1, "32-true", "not measured on mps yet; set precision='bf16-mixed'"),
        ("auto", TPU, "32-true", "not measured on xla yet"),
        ("bf16-mixed", OLD_CPU, "bf16-mixed", "Core 2 is no faster in bfloat16"),
        ("bf16-mixed", A100, "bf16-mixed", "as asked"),
        ("bf16-mixed", TPU, "bf16-mixed", "as asked; not measured on xla yet"),
        ("16-mixed", M1, "16-mixed", "as asked; not measured on mps yet"),
        ("16-mixed", TPU, "32-true", "precision='bf16-mixed' is for them"),
        ("16-mixed", XEON, "16-mixed", "as asked"),
        ("32-true", A100, "32-true", "as asked"),
    ],
)
def test_the_precision_suits_the_device(setting: PrecisionSetting, host: Host, precision: str, reason: str) -> None:
    found, why = resolve_precision(setting, host)
    assert found == precision
    assert reason in why


def test_a_precision_that_the_device_cannot_have_is_a_warning_and_the_loop_goes_on_in_float32() -> None:
    model = nn.Linear(4, 4)
    with pytest.warns(AccelWarning, match="precision='16-mixed': .*TPUs compute in bfloat16"):
        handle = accelerate(model, Plan(precision="16-mixed"), host=TPU)
    with handle.step():
        loss = model(torch.ones(1, 4)).sum()
    assert handle.scaler.scale(loss) is loss
    handle.undo()
    with pytest.raises(AccelError, match="precision='16-mixed'"):
        accelerate(model, Plan(precision="16-mixed", strict=True), host=TPU)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", None), ("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)]
)
def test_a_step_is_an_autocast_region(precision: PrecisionSetting, dtype: torch.dtype | None) -> None:
    model = nn.Linear(4, 4)
    handle = accelerate(model, Plan(precision=precision, techniques={"inplace_activations": False}))
    with handle.step():
        assert torch.is_autocast_enabled("cpu") is (dtype is not None)
        assert model(torch.ones(1, 4)).dtype == (dtype or torch.float32)
    handle.undo()


def test_a_weight_cast_under_no_grad_still_gets_its_gradient() -> None:
    """With autocast's cache on, the cast made under no_grad is reused, and the weight has no gradient."""
    model = nn.Linear(4, 4)
    handle = accelerate(model, Plan(precision="bf16-mixed", techniques={"inplace_activations": False}))
    with handle.step():
        with torch.no_grad():
            model(torch.ones(1, 4))
        model(torch.ones(1, 4)).sum().backward()
    handle.undo()
    assert model.weight.grad is not None


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_torchs_transformer_with_a_padding_mask_evaluates_under_autocast(precision: PrecisionSetting) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    padding = torch.tensor([[False, False, True], [False, True, True]])
    handle = accelerate(encoder, Plan(precision=precision, techniques={"inplace_activations": False}))
    with torch.no_grad(), handle.step("validate"):
        assert encoder(torch.randn(2, 3, 8), src_key_padding_mask=padding).isfinite().all()
    handle.undo()


@pytest.mark.parametrize(("device_type", "is_enabled"), [("cpu", False), ("cuda", True), ("", True)])
def test_the_fast_path_is_off_on_cpu_only_and_comes_back(device_type: str, is_enabled: bool) -> None:
    def stop() -> None:
        with without_mha_fast_path(device_type):
            assert torch.backends.mha.get_fastpath_enabled() is is_enabled
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        stop()
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_plain_loop_reaches_the_scaler_through_the_handle_also_after_undo() -> None:
    """For its state, which a checkpoint wants."""
    handle = accelerate(nn.Linear(1, 1), Plan(precision="16-mixed", techniques={"inplace_activations": False}))
    scaler = handle.scaler
    assert scaler.is_enabled()
    handle.undo()
    assert handle.scaler is scaler
