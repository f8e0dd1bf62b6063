"""Says what flash attention sees in a model: what was captured, what matched, and the first thing that did not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_accel.core.isolation import isolated
from lightning_accel.core.patch import MethodPatch, PatchSet, applied
from lightning_accel.core.report import one_line
from lightning_accel.techniques.flash_attention.backends import BACKENDS
from lightning_accel.techniques.flash_attention.finder import find_sites
from lightning_accel.techniques.flash_attention.hand_written import HandWrittenSite
from lightning_accel.techniques.flash_attention.sites import AttentionSite, Forward
from lightning_accel.techniques.site import Site


def explain(module: nn.Module, *inputs: Any, **kwargs: Any) -> str:
    """Says, for each place in ``module`` that computes attention, what flash attention makes of it.

    Attention that is written by hand is found in what a module really runs: give the inputs of one call, and the module
    runs once on them, in the mode and on the device that it is in. Its buffers and random streams are as before
    afterwards. Nothing is tried: whether a backend has the same numbers and is faster shows when a model is trained.

    Args:
        module: Any module.
        *inputs: What it is called with; without any, code that would have to run is named only.
        **kwargs: Likewise.

    Returns:
        A text to print: a paragraph a site.
    """
    sites, is_run = list(find_sites(module)), bool(inputs or kwargs)
    failures: dict[str, str] = {}
    if is_run:
        captured = [site for site in sites if isinstance(site, HandWrittenSite)]
        patches = (MethodPatch(s.site, "captured", s.module, "forward", _through(s, failures)) for s in captured)
        with isolated(module), applied(PatchSet(patches)):
            module(*inputs, **kwargs)
    lines = []
    for site in sites:
        lines.append(f"{site.site or 'the module itself'} ({type(module.get_submodule(site.site)).__name__})")
        told = [f"failed: {failures[site.site]}"] if site.site in failures else _told(site, is_run)
        lines += [f"  {line}" for line in told]
    return "\n".join(lines) or "no attention: no module's code names both a softmax and a matrix product"


def _through(site: HandWrittenSite, failures: dict[str, str]) -> Callable[[Forward], Forward]:
    def wrap(original: Forward) -> Forward:
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            try:
                return site.run(BACKENDS["sdpa"], original, args, kwargs)
            except Exception as error:
                failures[site.site] = one_line(error)
                return original(module, *args, **kwargs)  # raises what is the user's own

        return forward

    return wrap


def _told(site: AttentionSite | Site, is_run: bool) -> list[str]:
    if isinstance(site, Site):
        return [f"left alone: {site.why_not}"]
    if not isinstance(site, HandWrittenSite):
        return [f"{site.what}: taken at its word, nothing to capture"]
    if not is_run:
        return ["names a softmax and a matrix product: give explain() the inputs of a call to see more"]
    if site.capture is None:
        return [f"not captured: {site.nothing_found() or 'this call did not come to it'}"]
    found = dict.fromkeys(line for finding in site.capture.findings for line in str(finding).splitlines())
    return list(found) or [f"nothing to fuse: {site.nothing_found()}"]
