"""The technique: activations and dropouts overwrite their input where both proofs hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

from torch import nn
from typing_extensions import override

from lightning_accel.host import Host
from lightning_accel.patch import AttributePatch, Patch, PatchSet
from lightning_accel.techniques.base import Refusal, Technique, Verdict, Verdicts
from lightning_accel.techniques.inplace_activations.ownership import Proof, prove
from lightning_accel.techniques.inplace_activations.sites import compiled_part, find_sites, global_hook, unfit
from lightning_accel.techniques.inplace_activations.watch import watched


class InplaceActivations(Technique):
    """Sets ``inplace=True`` on the activation and dropout modules whose input nobody needs afterwards.

    An activation that overwrites an input which is read again makes the model silently wrong. So a site is changed
    only when two proofs hold: one from the code, on every path it can take, and one from a real step. The in-place
    forms of some activations (SiLU, ReLU6, …) copy their input for the backward pass: in training, those stay as
    they are.

    Args:
        skip: Prefixes of site names that are left alone, each with the reason.
    """

    name: ClassVar[str] = "inplace_activations"
    remembers: ClassVar[bool] = False
    on_by_default = True

    def __init__(self, *, skip: Mapping[str, str] | None = None) -> None:
        self._skip = dict(skip or {})
        self._proofs: dict[str, Proof] = {}

    @override
    def unavailable(self, host: Host) -> str | None:
        if host.kind == "xla":
            return "XLA turns what is done in place into new values and plans memory itself: there is nothing to gain"
        return None

    @override
    def patches(self, model: nn.Module, host: Host) -> Iterable[Patch | Refusal]:
        sites = find_sites(model)
        whole = self._whole_model(model) if sites else None
        refused = {site: whole or self._skipped(site) or unfit(module, host) for site, module in sites.items()}
        if all(refused.values()):
            return [Refusal(site, str(reason)) for site, reason in refused.items()]
        self._proofs = prove(model, {sites[site]: reason for site, reason in refused.items() if reason})
        return [
            Refusal(site, proof.reason)
            if proof.reason is not None
            else AttributePatch(site, "inplace=False → True", sites[site], "inplace", True)
            for site, proof in self._proofs.items()
        ]

    @override
    @contextmanager
    def trial(self, patches: PatchSet) -> Iterator[Verdicts]:
        sites = {patch.site: patch.target for patch in patches if isinstance(patch, AttributePatch)}
        verdicts: Verdicts = {}
        with watched(sites, self._proofs) as findings:
            yield verdicts
        for site, reason in findings.items():
            verdicts[site] = Verdict(keep=reason is None, reason=reason or "")

    def _skipped(self, site: str) -> str | None:
        for prefix, reason in self._skip.items():
            if not prefix or site == prefix or site.startswith(f"{prefix}."):
                return reason
        return None

    @staticmethod
    def _whole_model(model: nn.Module) -> str | None:
        compiled = compiled_part(dict(model.named_modules()))
        if compiled is not None:
            return f"{compiled} is compiled: the compiler plans memory itself, and the watch would turn it off"
        return global_hook()
