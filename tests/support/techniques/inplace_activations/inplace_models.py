"""Small models in many writing styles: which of their activations may overwrite their input, and which must not.

Each says so itself: ``in_place`` has the calls that are to be done in place, by site, on one step of training with the
options of each of ``others`` and one without any. All other calls must run as they were.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn


class Model(nn.Module):
    in_place: ClassVar[dict[str, int]] = {}
    others: ClassVar[tuple[dict[str, Any], ...]] = ()

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.act = nn.ReLU()


class Temporary(Model):
    in_place = {"act": 1}

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))


class SameName(Model):
    in_place = {"act": 1}

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.act(x)
        return self.b(x) + x


class SharedAndSafe(Model):
    in_place = {"act": 2}

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.a(x))
        out = self.b(out)
        out += x
        return self.act(out)


class SharedOnceUnsafe(Model):
    in_place = {"act": 1}

    def forward(self, x: Tensor) -> Tensor:
        out = self.act(self.a(x))
        y = self.b(out)
        return self.act(y) + y


class ReadAgain(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.act(x)
        return x + y


class ReadInTheSameExpression(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return x + self.act(x)


class ReadThroughView(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        rows = x.view(-1)
        y = self.act(x)
        return y.view(-1) + rows


class ReadThroughViewOfTheResultOnly(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.act(x)[:, :4] * 2


class InputIsAView(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.act(x[:, :4]) + x[:, 4:]


class KeptOnSelf(Model):
    def forward(self, x: Tensor) -> Tensor:
        self.last = h = self.a(x)
        h = self.act(h)
        return h + self.last


class KeptInAList(Model):
    def forward(self, x: Tensor) -> Tensor:
        seen = []
        h = self.a(x)
        seen.append(h)
        h = self.act(h)
        return h + seen[0]


class KeptInADict(Model):
    def forward(self, x: Tensor) -> Tensor:
        seen = {}
        h = self.a(x)
        seen["h"] = h
        return self.act(h) + seen["h"]


class KeptAsAttributeOfAnObject(Model):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        y = self.act(h)
        y.before = h
        return y + y.before
