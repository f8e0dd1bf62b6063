"""What techniques edit: the edits that there are, those that were refused, and what the report says of both."""

from __future__ import annotations

import warnings
from collections import defaultdict

from lightning_accel.core.measured import Measured
from lightning_accel.core.patch import Patch, PatchSet
from lightning_accel.core.report import AccelError, AccelWarning, Report
from lightning_accel.techniques.base import Refusal, Technique


class Edits:
    """The edits of all techniques of a run.

    Args:
        report: Told of every site.
        strict: Whether to raise where the default is to warn.

    Attributes:
        on_model: Of each technique, by its name.
        on_optimizers: The same, which no trial of modules decides on.
    """

    def __init__(self, report: Report, *, strict: bool) -> None:
        self.on_model: dict[str, PatchSet] = defaultdict(PatchSet)
        self.on_optimizers: dict[str, PatchSet] = defaultdict(PatchSet)
        self._report = report
        self._strict = strict

    def has(self, technique: Technique) -> bool:
        """Whether there is one of ``technique``, in force or not yet."""
        return bool(self.on_model[technique.name] or self.on_optimizers[technique.name])

    def enter(self, technique: Technique, claim: Patch | Refusal, patches: PatchSet) -> None:
        """Takes up what a technique has found at a site."""
        if isinstance(claim, Refusal):
            self._report.record_refused(technique.name, claim.site, claim.reason)
        else:
            patches.add(claim)

    def apply(self, technique: Technique, patch: Patch, remark: str, measured: Measured | None = None) -> None:
        """Puts an edit in force; refuses it where that fails."""
        try:
            patch.apply()
        except Exception as error:
            self.refuse(technique, patch.site, f"could not be applied: {type(error).__name__}: {error}", measured)
        else:
            self._report.record_applied(technique.name, patch.site, remark, measured)

    def refuse(self, technique: Technique, site: str, reason: str, measured: Measured | None = None) -> None:
        """Takes an edit back for good."""
        for patches in (self.on_model[technique.name], self.on_optimizers[technique.name]):
            if site in patches:
                patches.drop(site)
        self._report.record_refused(technique.name, site, reason, measured)

    def undo(self, technique: Technique) -> None:
        """Takes all edits of ``technique`` back, the report left as it is."""
        self.on_optimizers[technique.name].undo()
        self.on_model[technique.name].undo()

    def miss(self, technique: Technique) -> None:
        """Says so where a technique was asked for and has found nothing to do."""
        if technique.explicit and not self.has(technique) and not technique.acts_without_sites:
            reason = "; ".join(self._report.refused(technique.name).values()) or "this model has nothing for it"
            self.degrade(f"{technique.name} was asked for and found no site: {reason}")

    def degrade(self, message: str) -> None:
        """Says that something asked for is not done: a warning, or an error when the plan is strict."""
        if self._strict:
            raise AccelError(f"{message} (strict=True)")
        self._report.note(message)
        warnings.warn(message, AccelWarning, stacklevel=3)
