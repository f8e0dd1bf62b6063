"""Runs a hostile model, plain or accelerated, and says in what two runs differ."""

from __future__ import annotations

import copy
import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from support.hostile_parts import Row, take_seen

# A few hundred products a sum, ten sums deep, are off by one rounding each where they are taken in another order. The
# models here amplify no more than that (a nudge of every weight by an eps moves nothing by a tenth of it); one dropout
# drawn anew, one hidden state too many, one call more, is a hundred times as much.
ROUNDING = 4096 * torch.finfo(torch.float32).eps

_HOOKS = [name for name in vars(nn.Module()) if name.endswith("_hooks")]


@dataclass
class Run:
    """What is left of a run.

    Attributes:
        losses: Of every step.
        seen: What the watchers noted, in their order.
        logged: What the run logged, by name; our own left out.
        state: The module's ``state_dict``.
        changed: What of the module, by name, is another object, or has other attributes or hooks, than before.
    """

    losses: list[float]
    seen: list[Any]
    logged: dict[str, float]
    state: dict[str, Any]
    changed: list[str]


def train(row: Row, **options: Any) -> Run:
    """Trains the row's model from the same start as every other time."""
    torch.manual_seed(0)
    take_seen()
    module: Any = row.make()
    before = _belongings(module)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=1, max_epochs=1, enable_model_summary=False, **quiet, **options)
    random.seed(1)
    torch.manual_seed(1)
    trainer.fit(module)
    after = _belongings(module)
    return Run(
        losses=module.losses,
        seen=take_seen(),
        logged={name: float(v) for name, v in trainer.callback_metrics.items()},
        state=copy.deepcopy(module.state_dict()),
        changed=sorted(name for name in before | after if before.get(name) != after.get(name)),
    )


@functools.cache
def plain(row: Row) -> Run:
    """The run without us, once for all that are compared with it."""
    run = train(row)
    assert run.losses
    return run


def differences(run: Run, expected: Run, *, watched: bool = True) -> list[str]:
    """In what ``run`` is not what was expected, in words; ``watched``: whether watchers have to have seen the same."""
    found = [*_numbers("losses", torch.tensor(run.losses), torch.tensor(expected.losses))]
    if watched and run.seen != expected.seen:
        pairs = enumerate(zip(run.seen, expected.seen, strict=False))
        index = next((i for i, (a, b) in pairs if a != b), min(len(run.seen), len(expected.seen)))
        found.append(
            f"watchers saw {len(run.seen)} things, not {len(expected.seen)}; the first that differs is number {index}:"
            f" {run.seen[index : index + 1]}, not {expected.seen[index : index + 1]}"
        )
    if run.logged.keys() != expected.logged.keys():
        found.append(f"{sorted(run.logged)} were logged, not {sorted(expected.logged)}")
    for name in run.logged.keys() & expected.logged.keys():
        found += _numbers(f"the logged {name}", torch.tensor(run.logged[name]), torch.tensor(expected.logged[name]))
    if list(run.state) != list(expected.state):
        found.append(f"the state_dict has {list(run.state)}, not {list(expected.state)}")
    for name in run.state.keys() & expected.state.keys():
        found += _numbers(f"the state_dict's {name}", run.state[name], expected.state[name])
    if run.changed != expected.changed:
        found.append(f"the run left other modules, attributes or hooks at {run.changed}, not at {expected.changed}")
    return found


def _numbers(what: str, actual: Any, expected: Any) -> list[str]:
    if not isinstance(expected, Tensor):
        return [] if type(actual) is type(expected) else [f"{what} is a {type(actual)}, not a {type(expected)}"]
    try:
        torch.testing.assert_close(actual, expected, rtol=ROUNDING, atol=ROUNDING, check_stride=True)
    except AssertionError as error:
        return [f"{what}: {' '.join(str(error).split())}"]
    return []


def _belongings(model: nn.Module) -> dict[str, Any]:
    """Every module and parameter by name, with what an edit would leave at it."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        attributes = vars(module)
        hooks = {hook: [id(h) for h in attributes[hook].values()] for hook in _HOOKS if attributes.get(hook)}
        own = {key: attributes[key] for key in ("forward", "inplace", "momentum", "__class__") if key in attributes}
        found[name] = (id(module), type(module), sorted(attributes), own, hooks)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        hooks = len(tensor._backward_hooks or ()), len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())
        found[name] = (id(tensor), tensor.dtype, tensor.requires_grad, hooks)
    return found
