"""Checkpoints go both ways between an accelerated and a plain Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_accel import AccelPlugin
from lightning_accel.settings import Plan
from support.lightning_models import Call, Supervised, Transformer, cnn, images, tokens

MakeTrainer = Callable[..., Any]

pytestmark = [pytest.mark.numbers, pytest.mark.usefixtures("determinism_restored")]


def plugin(**settings: Any) -> AccelPlugin:
    return AccelPlugin.from_plan(
        Plan().replace(**{"precision": "32-true", "memory_format": "channels_last", **settings})
    )


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def new(optimizer: Any = fused_adamw, seed: int = 0) -> Supervised:
    torch.manual_seed(seed)
    return Supervised(cnn(), optimizer)


def tensors(data: Any, path: str = "") -> dict[str, Tensor]:
    if isinstance(data, Tensor):
        return {path: data}
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list | tuple) else ()
    return {name: tensor for key, value in items for name, tensor in tensors(value, f"{path}.{key}").items()}


def saved_by(make_trainer: MakeTrainer, module: Supervised, weights_only: bool = False, **options: Any) -> Any:
    """What a checkpoint that is written in the middle of the run holds."""
    saver = Call(on_train_epoch_end=lambda trainer, _: trainer.save_checkpoint("mid.ckpt", weights_only))
    make_trainer(callbacks=[saver, *options.pop("callbacks", ())], **options).fit(module, images())
    return torch.load("mid.ckpt", weights_only=True)


@pytest.mark.parametrize("weights_only", [False, True])
def test_tensors_in_the_file_have_the_names_shapes_and_strides_of_a_plain_run(
    make_trainer: MakeTrainer, weights_only: bool
) -> None:
    plain = saved_by(make_trainer, new(), weights_only)
    ours = saved_by(make_trainer, new(), weights_only, plugins=[plugin()])
    described = [
        {name: (tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in tensors(saved).items()}
        for saved in (plain, ours)
    ]
    assert described[1] == described[0]


def test_values_in_the_file_are_those_of_a_plain_run(make_trainer: MakeTrainer) -> None:
    plain = saved_by(make_trainer, new(torch.optim.SGD))
    ours = saved_by(make_trainer, new(torch.optim.SGD), plugins=[plugin()])
    torch.testing.assert_close(ours["state_dict"], plain["state_dict"], rtol=1e-4, atol=1e-5)


class Tells(Callback):
    """Has the names of its attributes as its state."""

    def on_train_batch_end(self, *_: Any) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"attributes": [*vars(self)]}


def test_a_callback_that_saves_its_attributes_saves_none_of_ours(make_trainer: MakeTrainer) -> None:
    plain = saved_by(make_trainer, new(), callbacks=[Tells()])
    ours = saved_by(make_trainer, new(), callbacks=[Tells()], plugins=[plugin()])
    assert ours["callbacks"] == plain["callbacks"]


@pytest.mark.parametrize("first", ["plain", "accelerated"])
@pytest.mark.parametrize("second", ["plain", "accelerated"])
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(make_trainer: MakeTrainer, first: str, second: str) -> None:
    def options(kind: str) -> dict[str, Any]:
        return {"deterministic": True, "plugins": [plugin()] if kind == "accelerated" else []}

    whole = new()
    make_trainer(max_epochs=4, **options("plain")).fit(whole, images())
    started = new()
    trainer = make_trainer(max_epochs=2, **options(first))
    trainer.fit(started, images())
    trainer.save_checkpoint("half.ckpt")
    resumed = new(seed=1)
    make_trainer(max_epochs=4, **options(second)).fit(resumed, images(), ckpt_path="half.ckpt")
    assert started.losses + resumed.losses == pytest.approx(whole.losses, rel=1e-4)


def test_a_resumed_transformer_is_exact(make_trainer: MakeTrainer) -> None:
    def start(**options: Any) -> tuple[Supervised, Any]:
        torch.manual_seed(0)
        given = plugin(memory_format="auto", flash_attention="off", gradient_checkpointing="full")
        return Supervised(Transformer(dropout=0.0), fused_adamw), make_trainer(plugins=[given], **options)

    whole, trainer = start(max_epochs=4)
    trainer.fit(whole, tokens())
    started, trainer = start(max_epochs=2)
    trainer.fit(started, tokens())
    trainer.save_checkpoint("half.ckpt")
    resumed, trainer = start(max_epochs=4)
    trainer.fit(resumed, tokens(), ckpt_path="half.ckpt")
    assert started.losses + resumed.losses == whole.losses


def test_a_plain_trainer_resumes_without_a_warning(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(plugins=[plugin()], enable_checkpointing=True)
    trainer.fit(new(), images())
    trainer.save_checkpoint("a.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(max_epochs=2, enable_checkpointing=True).fit(new(), images(), ckpt_path="a.ckpt")
    said = [str(w.message) for w in caught]
    assert not [line for line in said if any(word in line for word in ("allback", "lugin", "AccelPlugin", "Speed"))]


def test_a_resumed_run_decides_the_same_without_another_trial(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(plugins=[plugin(memory_format="auto", gradient_checkpointing=BLOCKS)])
    trainer.fit(new(), images())
    trainer.save_checkpoint("a.ckpt")
    module, calls = new(), []
    module.net[0].register_forward_hook(lambda *_: calls.append(1))
    resumed = plugin(memory_format="auto", gradient_checkpointing=BLOCKS)
    make_trainer(plugins=[resumed], max_epochs=2).fit(module, images(), ckpt_path="a.ckpt")
    assert len(calls) == 4
    before, after = trainer.precision_plugin.report.to_dict(), resumed.report.to_dict()
    assert after["techniques"] == before["techniques"]


BLOCKS = {"mode": "full", "blocks": ["net.3"]}


def test_evaluating_from_a_checkpoint_decides_as_the_training_did(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(plugins=[plugin()])
    trainer.fit(new(), images())
    trainer.save_checkpoint("a.ckpt")
    module, calls = new(), []
    module.net[0].register_forward_hook(lambda *_: calls.append(1))
    make_trainer(plugins=[plugin()]).validate(module, images(), ckpt_path="a.ckpt")
    assert len(calls) == 4


def test_a_checkpoint_loads_strictly_into_the_bare_network(make_trainer: MakeTrainer) -> None:
    module = new()
    saved = saved_by(make_trainer, module, plugins=[plugin(gradient_checkpointing=BLOCKS)])
    net = cnn()
    net.load_state_dict({name.removeprefix("net."): tensor for name, tensor in saved["state_dict"].items()})
    assert torch.equal(net[0].weight, module.net[0].weight)


def test_load_from_checkpoint_reads_what_a_run_wrote(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(plugins=[plugin()])
    module = new()
    trainer.fit(module, images())
    trainer.save_checkpoint("a.ckpt")
    loaded = Supervised.load_from_checkpoint("a.ckpt", net=cnn())
    assert torch.equal(loaded.net[3].weight, module.net[3].weight)


def test_a_fit_from_a_checkpoint_of_another_model_is_lightnings_error(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(plugins=[plugin()])
    trainer.fit(new(), images())
    trainer.save_checkpoint("a.ckpt")
    other = Supervised(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 4)))
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict"):
        make_trainer(plugins=[plugin()]).fit(other, images(), ckpt_path="a.ckpt")


class Residual(nn.Module):
    """``x + relu(x)`` reads the activation's input again only if it is told to."""

    def __init__(self, reads_again: bool) -> None:
        super().__init__()
        self.embedding, self.act, self.head = nn.Embedding(11, 8), nn.ReLU(), nn.Linear(8, 11)
        self.also = nn.Identity() if reads_again else Nothing()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * 2.0
        also = self.also(x)
        y = self.act(x)
        return self.head(y if also is None else y + also)


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> None:
        return None


def test_an_activation_is_proven_anew_when_the_resumed_program_has_changed(make_trainer: MakeTrainer) -> None:
    """A verdict from the checkpoint would let the ReLU overwrite what the new program reads again."""

    def start(reads_again: bool, **options: Any) -> tuple[Supervised, Any]:
        torch.manual_seed(0)
        return Supervised(Residual(reads_again)), make_trainer(**options)

    module, trainer = start(False, plugins=[plugin(memory_format="off")])
    trainer.fit(module, tokens())
    trainer.save_checkpoint("a.ckpt")
    runs = []
    for plugins in ([], [plugin(memory_format="off")]):
        module, trainer = start(True, plugins=plugins, max_epochs=2)
        trainer.fit(module, tokens(), ckpt_path="a.ckpt")
        runs.append(module.losses)
    assert runs[1] == runs[0]
