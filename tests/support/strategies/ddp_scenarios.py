"""What accel_ddp makes of models, on two CPU processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn

from lightning_accel import AccelDDPStrategy
from support.lightning_models import Supervised, Transformer, tokens
from support.strategies.scenarios import fit, scenario, transformer, whole_weights


class Wrappers(Callback):
    """How the model is wrapped at the end of every step."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        model: Any = trainer.strategy.model
        graph = "static" if getattr(model, "static_graph", False) else "searched"
        graph = (
            graph if getattr(model, "static_graph", False) or getattr(model, "find_unused_parameters", False) else ""
        )
        self.seen.append(f"{type(model).__name__} {graph}".strip())


class Wayward(Supervised):
    """Uses its spare layer in the steps, and on the ranks, that it is told."""

    def __init__(self, uses: Callable[[int, int], bool]) -> None:
        seed_everything(0, verbose=False)
        super().__init__(Transformer(dropout=0.0))
        self.spare = nn.Linear(16, 16)
        self.uses = uses

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return (
            loss + self.spare.weight.sum() * 1e-3 + self.spare.bias.sum()
            if self.uses(batch_idx, self.global_rank)
            else loss
        )


def wrapped(module: LightningModule, strategy: Any = "accel_ddp", **options: Any) -> dict[str, Any]:
    wrappers = Wrappers()
    fit(module, tokens(8), strategy, wrappers, **options)
    return {"wrappers": wrappers.seen, "weights": whole_weights(module)}


@scenario
def every_parameter_is_used() -> Any:
    return wrapped(transformer())


@scenario
def every_parameter_is_used_and_gradients_accumulate() -> Any:
    return wrapped(transformer(), max_steps=2, accumulate_grad_batches=2)


@scenario
def a_parameter_is_unused() -> Any:
    return wrapped(Wayward(lambda step, rank: False))


@scenario
def a_parameter_is_unused_on_rank_1() -> Any:
    return wrapped(Wayward(lambda step, rank: rank == 0))


class Looking(Supervised):
    """Looks up rows on rank 0 alone, and their gradient is sparse."""

    def __init__(self) -> None:
        seed_everything(0, verbose=False)
        super().__init__(Transformer(dropout=0.0))
        self.rows = nn.Embedding(4, 3, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if self.global_rank else loss + self.rows(batch[0][:, :1] % 4).sum()


@scenario
def a_sparse_gradient_is_there_on_rank_0() -> Any:
    return wrapped(Looking())


@scenario
def a_parameter_is_unused_in_the_second_step() -> Any:
    return wrapped(Wayward(lambda step, rank: step != 1), max_steps=4)


@scenario
def a_parameter_is_unused_in_the_third_step() -> Any:
    return wrapped(Wayward(lambda step, rank: step < 2))


@scenario
def a_parameter_is_unused_now_and_then_and_it_was_said() -> Any:
    return wrapped(Wayward(lambda step, rank: step < 2), AccelDDPStrategy(find_unused_parameters=True))


class Clamping(Supervised):
    """Changes its gradients after the backward pass, when DDP has averaged them."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.clamp_(-1e-3, 1e-3)


@scenario
def gradients_are_changed_after_the_backward_pass() -> Any:
    def weights_under(strategy: str) -> Tensor:
        seed_everything(0, verbose=False)
        module = Clamping(Transformer(dropout=0.0))
        fit(module, tokens(8), strategy)
        return whole_weights(module)

    return {"accel_ddp": weights_under("accel_ddp"), "ddp": weights_under("ddp")}


class Turning(Supervised):
    """Takes its steps by hand from the second epoch on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def on_train_epoch_end(self) -> None:
        self.automatic_optimization = False


@scenario
def optimization_becomes_manual() -> Any:
    seed_everything(0, verbose=False)
    return wrapped(Turning(Transformer(dropout=0.0)), max_epochs=2, max_steps=-1, limit_train_batches=2)


@scenario
def a_static_graph_was_said() -> Any:
    return wrapped(transformer(), AccelDDPStrategy(static_graph=True))


@scenario
def gradients_travel_in_bfloat16() -> Any:
    return wrapped(transformer(), AccelDDPStrategy(gradient_compression="bf16"))


@scenario
def gradients_travel_in_float16() -> Any:
    return wrapped(transformer(), AccelDDPStrategy(gradient_compression="fp16"))
