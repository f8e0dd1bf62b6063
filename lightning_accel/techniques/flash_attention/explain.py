"""Says what flash attention sees in a model: what was captured, what matched, and the first thing that did not."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.fx import Node

from lightning_accel.core.isolation import isolated
from lightning_accel.core.patch import MethodPatch, PatchSet
from lightning_accel.techniques.base import Refusal
from lightning_accel.techniques.flash_attention.backends import BACKENDS
from lightning_accel.techniques.flash_attention.finder import find_sites
from lightning_accel.techniques.flash_attention.form import Edit, Finding
from lightning_accel.techniques.flash_attention.hand_written import Capture, HandWrittenSite
from lightning_accel.techniques.flash_attention.sites import Forward


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
    sites = list(find_sites(module))
    by_hand = [site for site in sites if isinstance(site, HandWrittenSite)]
    is_run = bool(by_hand and (inputs or kwargs))
    if is_run:
        patches = PatchSet()
        for site in by_hand:
            patches.add(MethodPatch(site.site, "captured", site.module, "forward", _through(site)))
        with isolated(module):
            patches.apply()
            try:
                module(*inputs, **kwargs)
            finally:
                patches.undo()
    lines: list[str] = []
    told: set[Capture] = set()
    for claim in sites:
        kind = type(module.get_submodule(claim.site)).__name__
        lines.append(f"{claim.site or 'the module itself'} ({kind})")
        if isinstance(claim, Refusal):
            lines.append(f"  left alone: {claim.reason}")
        elif not isinstance(claim, HandWrittenSite):
            lines.append(f"  {claim.what}: taken at its word, nothing to capture")
        elif not is_run:
            lines.append("  names a softmax and a matrix product: give explain() the inputs of a call to see more")
        elif claim.capture is None:
            lines.append(
                f"  not captured: {claim.nothing_found() or 'this call did not come to it, or hooks watch it'}"
            )
        elif claim.capture in told:
            lines.append("  runs the same code as one above")
        else:
            told.add(claim.capture)
            lines += [f"  {line}" for line in _told(claim.capture)]
    return "\n".join(lines) or "no attention: no module's code names both a softmax and a matrix product"


def _through(site: HandWrittenSite) -> Any:
    def wrap(original: Forward) -> Forward:
        return lambda module, *args, **kwargs: site.fused(BACKENDS["sdpa"], original, args, kwargs)

    return wrap


def _told(capture: Capture) -> list[str]:
    lines = [f"captured in {capture.graphs} graph" + "s" * (capture.graphs != 1)]
    lines += [] if capture.findings else ["no softmax in what was captured"]
    for finding in capture.findings:
        lines.append(_place(finding.softmax))
        lines.append(f"  {_matched(finding)}" if finding.form else f"  left alone: {finding.reason}")
    return lines


def _place(node: Node) -> str:
    """The line of the user's code that a node comes from."""
    found = re.findall(r'File "(.*)", line (\d+).*\n(.*)', node.stack_trace or "")
    if not found:
        return f"softmax `{node.name}`"
    file, line, code = found[-1]
    return f"softmax in {file}:{line}: `{code.strip()}`"


def _matched(finding: Finding) -> str:
    form = finding.form
    assert form is not None
    steps = ["query @ key", *(_edit(edit) for edit in form.edits), "softmax"]
    steps += [f"dropout {form.dropout_p}"] * (form.dropout_p != 0) + ["@ value"]
    return "attention, fused: " + " → ".join(steps)


def _edit(edit: Edit) -> str:
    by = (
        f"`{edit.by.name}`"
        if isinstance(edit.by, Node)
        else f"{edit.by:.4g}"
        if isinstance(edit.by, float)
        else edit.by
    )
    verb = {"multiply": "times", "divide": "divided by", "add": "plus", "cast": "cast to"}.get(edit.kind)
    return f"{verb} {by}" if verb else f"{edit.fill:g} where {by} is {edit.kind == 'hide'}"
