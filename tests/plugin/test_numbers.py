"""An accelerated run computes what the plain one computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_accel import AccelPlugin
from lightning_accel.core.host import Host
from lightning_accel.settings import Plan
from support.lightning_models import Supervised, Transformer, cnn, images, tokens

pytestmark = pytest.mark.numbers

MakeTrainer = Callable[..., Any]

OFF: dict[str, Any] = {
    "flash_attention": "off",
    "memory_format": "off",
    "inplace_activations": False,
    "optimizer": "off",
    "report": False,
}


def trained(make_trainer: MakeTrainer, net: Callable[[], nn.Module], data: Any, **options: Any) -> Supervised:
    torch.manual_seed(0)
    module = Supervised(net())
    make_trainer(max_epochs=3, **options).fit(module, data, data)
    return module


@pytest.mark.parametrize(("net", "data"), [(cnn, images()), (Transformer, tokens())], ids=["cnn", "transformer"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_plugin_with_everything_off_changes_nothing(
    make_trainer: MakeTrainer, net: Callable[[], nn.Module], data: Any, precision: Any
) -> None:
    plain = trained(make_trainer, net, data, precision=precision)
    accelerated = trained(
        make_trainer, net, data, plugins=[AccelPlugin.from_plan(Plan().replace(precision=precision, **OFF))]
    )
    assert accelerated.losses == plain.losses


@pytest.mark.parametrize("checkpointing", ["off", "full", "selective"])
def test_a_transformer_in_float32_is_exact_with_everything_on(make_trainer: MakeTrainer, checkpointing: Any) -> None:
    plain = trained(make_trainer, Transformer, tokens())
    # Fused attention and optimizers sum in another order, and are tested for themselves.
    exact: dict[str, Any] = {"precision": "32-true", "flash_attention": "off", "optimizer": "off"}
    plugin = AccelPlugin.from_plan(Plan().replace(**exact, gradient_checkpointing=checkpointing))
    accelerated = trained(make_trainer, Transformer, tokens(), plugins=[plugin])
    assert accelerated.losses == plain.losses
    if checkpointing != "off":
        assert plugin.report.applied("gradient_checkpointing") == [f"net.blocks.{i}" for i in range(3)]


@pytest.mark.parametrize("checkpointing", ["off", "full", "selective"])
def test_a_cnn_in_float32_is_the_same_with_everything_on(make_trainer: MakeTrainer, checkpointing: str) -> None:
    plain = trained(make_trainer, cnn, images())
    plugin = AccelPlugin(
        precision="32-true",
        memory={"checkpoint": checkpointing, "blocks": ["net.0", "net.3"]},
        techniques={"memory_format": "channels_last"},
    )
    accelerated = trained(make_trainer, cnn, images(), plugins=[plugin])
    assert accelerated.losses == pytest.approx(plain.losses, rel=1e-5)
    assert plugin.report.applied("memory_format")


def test_checkpointing_with_accumulated_gradients_is_exact(make_trainer: MakeTrainer) -> None:
    plain = trained(make_trainer, Transformer, tokens(), accumulate_grad_batches=2, gradient_clip_val=0.1)
    exact: dict[str, Any] = {"precision": "32-true", "flash_attention": "off", "optimizer": "off"}
    plugin = AccelPlugin.from_plan(Plan().replace(**exact, gradient_checkpointing="full"))
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    accelerated = trained(make_trainer, Transformer, tokens(), plugins=[plugin], **options)
    assert accelerated.losses == plain.losses


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16), ("16-mixed", torch.half)]
)
def test_lightnings_helpers_read_the_compute_dtype_off_the_plugin(precision: Any, dtype: torch.dtype) -> None:
    assert _plugin_to_compute_dtype(AccelPlugin(precision=precision)) == dtype


@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_trainer_precision_and_scaler_are_those_of_the_plugin(make_trainer: MakeTrainer, precision: Any) -> None:
    plugin = AccelPlugin(precision=precision)
    trainer = make_trainer(plugins=[plugin])
    trainer.fit(Supervised(cnn()), images())
    assert trainer.precision == precision
    assert trainer.scaler is plugin.scaler
    assert (plugin.scaler is not None) == (precision == "16-mixed")


def test_auto_becomes_known_when_the_run_starts(make_trainer: MakeTrainer) -> None:
    plugin = AccelPlugin()
    trainer = make_trainer(plugins=[plugin])
    trainer.fit(Supervised(cnn()), images())
    expected = "bf16-mixed" if Host.detect("cpu").native_bf16 else "32-true"
    assert trainer.precision == expected
    assert isinstance(plugin, MixedPrecision) == (expected != "32-true")


def test_a_module_sees_autocast_in_its_steps_and_not_outside(make_trainer: MakeTrainer) -> None:
    seen: dict[str, bool] = {}

    class Looks(Supervised):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen["training_step"] = torch.is_autocast_enabled("cpu")
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen["validation_step"] = torch.is_autocast_enabled("cpu")

        def on_train_batch_end(self, *_: Any) -> None:
            seen["hook"] = torch.is_autocast_enabled("cpu")

    make_trainer(plugins=[AccelPlugin(precision="bf16-mixed")]).fit(Looks(cnn()), images(), images())
    assert seen == {"training_step": True, "validation_step": True, "hook": False}


@pytest.mark.parametrize(("precision", "is_lower"), [("auto", False), ("bf16-mixed", True)])
def test_a_model_summary_runs_the_model_in_the_precision_that_the_user_chose(
    make_trainer: MakeTrainer, precision: Any, is_lower: bool
) -> None:
    """Nothing repeats it in float32 if it raises in bfloat16."""
    seen: list[bool] = []

    class Sums(Supervised):
        example_input_array = torch.ones(2, 3, 8, 8)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.is_autocast_enabled("cpu"))
            return self.net(x)

    plugin = AccelPlugin(precision=precision, trust="checked")  # whose first step is no plain one
    make_trainer(plugins=[plugin], enable_model_summary=True).fit(Sums(cnn()), images())
    assert seen[0] == is_lower


def test_a_distribution_of_nan_ends_the_run_though_attention_was_captured(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's first compilation in a process switches that check off: whoever did not ask for one has it still."""
    checks = torch.distributions.Distribution
    monkeypatch.setattr(checks, "_validate_args", True)
    patcher = torch._dynamo.eval_frame.TorchPatcher
    monkeypatch.setattr(patcher, "patch", lambda: checks.set_default_validate_args(False))

    class Diverges(Supervised):
        def loss(self, batch: Any) -> Tensor:
            captured.append(plugin.report.applied("flash_attention"))
            mean = super().loss(batch) + (torch.nan if self.global_step == 3 else 0)
            return -torch.distributions.Normal(mean, 1.0).log_prob(torch.zeros(()))

    captured: list[list[str]] = []
    plugin = AccelPlugin(precision="32-true", trust="checked")
    with pytest.raises(ValueError, match="Expected parameter loc"):
        make_trainer(max_epochs=9, plugins=[plugin]).fit(Diverges(Transformer()), tokens())
    assert any(captured)


class Padded(Supervised):
    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -2:] = True
        return self.net(x, src_key_padding_mask=padding).pow(2).mean()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # once a process
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_a_transformer_encoder_with_a_padding_mask_validates(make_trainer: MakeTrainer, precision: Any) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    module = Padded(nn.TransformerEncoder(layer, 2))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4, 6, 16), torch.zeros(4)), 2)
    trainer = make_trainer(plugins=[AccelPlugin(precision=precision)])
    trainer.fit(module, data, data)
    trainer.validate(module, data)
    assert torch.isfinite(trainer.callback_metrics["val_loss"])
