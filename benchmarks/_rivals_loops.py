"""The sides of :mod:`rivals` that are not Lightning's: a loop by hand, and other people's tools."""

from __future__ import annotations

from typing import Any

import torch
from _rivals_training import LR, Training, prepare_by_hand
from torch import Tensor, nn


def by_hand(training: Training, *, is_compiled: bool = False) -> None:
    """What an expert writes who has read the guides: bfloat16, torch's attention, channels_last, fused AdamW."""
    device, net = training.device, training.net.to(training.device)
    takes_images = prepare_by_hand(net, device)
    optimizer = training.optimizer(fused=True)
    call = torch.compile(net) if is_compiled else net
    for batch in training.loader(pinned=device == "cuda"):
        inputs, labels = (each.to(device, non_blocking=True) for each in batch)
        if takes_images:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=training.has_bf16):
            loss = training.loss(call(inputs), labels)
        loss.backward()
        optimizer.step()
        training.clock.step(loss)


def accelerate(training: Training, **options: Any) -> None:
    """Hugging Face's Accelerate around a loop of torch's."""
    from accelerate import Accelerator

    precision = "bf16" if training.has_bf16 else "no"
    accelerator = Accelerator(mixed_precision=precision, cpu=training.device == "cpu", **options)
    net, optimizer, loader = accelerator.prepare(training.net, training.optimizer(), training.loader())
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = training.loss(net(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        training.clock.step(loss)


class WithLoss(nn.Module):
    """A model as transformers' Trainer wants it: its outputs begin with the loss."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        self.net, self._loss = training.net, training.loss

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(inputs)
        return {"loss": self._loss(logits, labels), "logits": logits}


def transformers_trainer(training: Training) -> None:
    """The Trainer of transformers, with the fused AdamW that it takes by default."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watched(Trainer):  # type: ignore[misc]
        """Trains on the same batches, and keeps the loss of the latest."""

        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(training.loader("inputs", "labels"))

        def training_step(self, *args: Any, **options: Any) -> Tensor:
            self.latest: Tensor = super().training_step(*args, **options)
            return self.latest

    class Watch(TrainerCallback):  # type: ignore[misc]
        """Shows every step to the clock."""

        def on_step_end(self, *args: Any, **options: Any) -> None:
            training.clock.step(trainer.latest)

    arguments = TrainingArguments(
        output_dir=str(training.folder),
        max_steps=training.steps,
        per_device_train_batch_size=len(training.batches[0][1]),
        bf16=training.has_bf16,
        use_cpu=training.device == "cpu",
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,  # the others do not clip, either
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Watched(
        model=WithLoss(training),
        args=arguments,
        train_dataset=training.loader("inputs", "labels").dataset,
        optimizers=(training.optimizer(fused=True), None),
        callbacks=[Watch()],
    )
    trainer.train()


def autotune(training: Training) -> None:
    """pytorch-autotune's search, in its shortest form, and the step that it comes to."""
    from pytorch_autotune import autotune as tuned

    found = tuned(
        training.net,
        training.batches[0],
        loss_fn=training.loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LR),
        budget="fast",
        device=training.device,
    )
    training.notes["report"] = str(found.report)
    for batch in training.loader():
        training.clock.step(found.step(*(each.to(training.device) for each in batch)))


def composer(training: Training) -> None:
    """MosaicML's Composer, with the precision that it takes by default on a GPU, and channels_last for images."""
    from composer import Callback, Trainer
    from composer.algorithms import ChannelsLast
    from composer.models import ComposerModel

    class Model(ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = training.net

        def forward(self, batch: Any) -> Tensor:
            return self.net(batch[0])

        def loss(self, outputs: Tensor, batch: Any, *_: Any) -> Tensor:
            return training.loss(outputs, batch[1])

    class Watch(Callback):  # type: ignore[misc]
        def batch_end(self, state: Any, logger: Any) -> None:
            training.clock.step(state.loss)

    is_image = training.batches[0][0].dim() == 4
    trainer = Trainer(
        model=Model(),
        train_dataloader=training.loader(),
        optimizers=training.optimizer(),
        max_duration=f"{training.steps}ba",
        device="cpu" if training.device == "cpu" else "gpu",
        device_train_microbatch_size=len(training.batches[0][1]),  # the loader, which has batches, does not tell
        algorithms=[ChannelsLast()] if is_image else [],
        callbacks=[Watch()],
        progress_bar=False,
    )
    trainer.fit()


def thunder(training: Training) -> None:
    """Lightning Thunder's compiler in a loop of torch's."""
    import thunder as compiler

    net, optimizer = training.net.to(training.device), training.optimizer()
    # compile() begins with nvFuser, which a machine without a GPU does not have.
    call = compiler.jit(net) if training.device == "cpu" else compiler.compile(net)
    for batch in training.loader():
        inputs, labels = (each.to(training.device) for each in batch)
        optimizer.zero_grad()
        loss = training.loss(call(inputs), labels)
        loss.backward()
        optimizer.step()
        training.clock.step(loss)
