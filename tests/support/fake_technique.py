"""A technique that changes ReLUs and writes down what an engine asks of it, and engines with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from lightning_accel.core.host import Host
from lightning_accel.core.patch import AttributePatch, Patch, PatchSet
from lightning_accel.engine import Engine
from lightning_accel.techniques.base import Technique
from lightning_accel.techniques.site import Site
from lightning_accel.techniques.technique_context import Verdict, Verdicts
from lightning_accel.techniques.technique_events import Event, Settled

HOST = Host(kind="cpu", device_name="a CPU")


class Fake(Technique):
    """Sets ``inplace`` on every ReLU of the model, and writes down what the engine asks of it."""

    name: ClassVar[str] = "fake"

    def __init__(self, *, verdict: Verdict | None = None, **attributes: Any) -> None:
        self.calls: list[str] = []
        self.verdict = verdict or Verdict("kept", "2.0x the speed here")
        self.reason: str | None = None
        traits = {name: attributes.pop(name) for name in [*attributes] if hasattr(self.traits, name)}
        self.traits = replace(self.traits, **traits)
        for name, value in attributes.items():
            setattr(self.run if hasattr(self.run, name) else self, name, value)
        self.run.at_end.callback(self.calls.append, "close")

    def unavailable(self, host: Host) -> str | None:
        return self.reason

    def sites(self, model: nn.Module, host: Host) -> Iterable[Patch]:
        for site, module in model.named_modules():
            if isinstance(module, nn.ReLU):
                yield AttributePatch(site, "inplace → True", module, "inplace", True)
            elif isinstance(module, nn.Linear):
                yield Site(site, why_not="a linear layer")

    @contextmanager
    def trial(self, patches: PatchSet) -> Iterator[Verdicts]:
        self.calls.append("trial")
        yield {patch.site: self.verdict for patch in patches}

    @contextmanager
    def step(self, stage: str) -> Iterator[None]:
        self.calls.append(f"enter {stage}")
        try:
            yield
        finally:
            self.calls.append(f"leave {stage}")

    def batch(self, batch: Any, stage: str) -> Any:
        return batch + 1

    def on(self, event: Event) -> None:
        if isinstance(event, Settled):
            self.calls.append("settled")


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU())


def engine(net: nn.Module, *techniques: Technique, **options: Any) -> Engine:
    return Engine(net, HOST, techniques, **options)


def inplace(net: nn.Module) -> list[bool]:
    return [m.inplace for m in net.modules() if isinstance(m, nn.ReLU)]
