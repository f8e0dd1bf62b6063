"""Names the rank whose death breaks a run off. A collective call only reports a lost connection."""

from __future__ import annotations

import re
import socket
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch.distributed as dist

from lightning_accel.core.ranks import gather

# Messages of gloo, the store and NCCL on a lost or silent connection. Errors on tensor shapes or on cards that are
# assigned twice do not match.
_BROKEN = re.compile(
    r"(gloo/|nccl|watchdog).*"
    r"(connection (was )?(closed|reset|refused)|broken pipe|timed ?out|timeout|(read|write) error|remote process)"
    r"|Application timeout caused pair closure",
    re.I | re.S,
)
_CLOCK_SLACK_S = 5.0  # start times shift with the system clock; a process number is not reused that soon
_OLD_S = 3600.0
_LOOK_S = 0.05
_MARK = "lightning-accel-gave-up-"


@dataclass(frozen=True, kw_only=True)
class Member:
    """The process of a rank. ``started``, in seconds since 1970, identifies it, as process numbers are reused."""

    rank: int
    host: str
    pid: int
    started: float

    @classmethod
    def here(cls) -> Member:
        """Returns this process as a member."""
        process = psutil.Process()
        rank = dist.get_rank() if dist.is_initialized() else 0
        return cls(rank=rank, host=socket.gethostname(), pid=process.pid, started=process.create_time())

    def lives(self) -> bool:
        """Returns whether the process exists and is no zombie. Call it on the process's host only."""
        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.started) > _CLOCK_SLACK_S:
                return False
            return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        except psutil.NoSuchProcess:
            return False

    @property
    def mark(self) -> Path:
        """Returns the path of the file that says that this process ended because of another one."""
        return Path(tempfile.gettempdir(), f"{_MARK}{self.pid}-{self.started:.0f}")


@dataclass(frozen=True)
class Roster:
    """The processes of a run by rank, and this process among them, recorded while all are alive."""

    members: Sequence[Member]
    own: Member

    @classmethod
    def gather(cls) -> Roster:
        """Collects the default process group; this process alone if there is none. A collective call."""
        _forget_old_marks()
        own = Member.here()
        return cls(gather(own), own)

    def lost(self) -> list[Member]:
        """Returns the ranks on this host whose processes have ended, for whatever reason."""
        return [member for member in self.members if member.host == self.own.host and not member.lives()]


def name_lost_ranks(exception: BaseException, roster: Roster, patience_s: float = 2.0) -> None:
    """Appends the sentence of :func:`explain` to the text of ``exception``."""
    sentence = explain(exception, roster, patience_s)
    if sentence is not None:
        exception.args = (f"{exception}\n{sentence}",)


def explain(exception: BaseException, roster: Roster, patience_s: float = 2.0) -> str | None:
    """Says which rank's death caused the exception. None if no broken collective call caused it.

    A rank that breaks off because of another's death ends as well, and might be taken for the first one that died. So
    it leaves a mark, an empty file in the temporary folder, which the other ranks of its host find.

    Args:
        exception: The error that ended the run on this rank.
        roster: The processes of the run.
        patience_s: Seconds to wait for a death to become visible. A process's connections close before the process
            ends.
    """
    if len(roster.members) == 1 or not is_broken_collective(exception):
        return None
    with suppress(OSError):  # no room for the mark: the others may then name this rank
        roster.own.mark.touch()
    for _ in range(1 + round(patience_s / _LOOK_S)):  # not by a clock, which tests may have frozen
        lost = [member for member in roster.lost() if not member.mark.exists()]
        if lost:
            return _of_lost(lost, roster)
        time.sleep(_LOOK_S)
    return _of_none_lost(roster)


def is_broken_collective(exception: BaseException) -> bool:
    """Returns whether other processes that ended or do not answer caused ``exception``."""
    if isinstance(exception, dist.DistNetworkError | dist.DistStoreError):
        return True
    # NCCL's errors all have one class, which is a RuntimeError, as gloo's are.
    return isinstance(exception, RuntimeError) and _BROKEN.search(str(exception)) is not None


def _of_lost(lost: Sequence[Member], roster: Roster) -> str:
    processes = _listed(f"{member.rank} (pid {member.pid} on host {member.host})" for member in lost)
    others = _ranks([member for member in roster.members if member not in lost])
    has_died = f"Rank {processes} has died; {others} cannot go on without it. Its"
    have_died = f"Ranks {processes} have died; {others} cannot go on without them. Their"
    return (
        f"{has_died if len(lost) == 1 else have_died} own output says why; 'Killed', or an exit status of 137 or -9,"
        " means that the system ended it, often for want of memory. To go on from the last checkpoint:"
        " trainer.fit(..., ckpt_path='last')."
    )


def _of_none_lost(roster: Roster) -> str:
    elsewhere: dict[str, list[Member]] = {}
    for member in roster.members:
        if member.host != roster.own.host:
            elsewhere.setdefault(member.host, []).append(member)
    places = [f"{host} ({_ranks(members)})" for host, members in elsewhere.items()]
    look = f" Look at the output of those on {_listed(places)}." if places else ""
    return (
        f"No rank on this host, {roster.own.host}, has died.{look} If none has, one took longer over its part, or waits"
        " in a step that the others do not take, than the process group's timeout allows: the strategy's timeout="
        "datetime.timedelta(...) sets it."
    )


def _ranks(members: Sequence[Member]) -> str:
    return f"{'rank' if len(members) == 1 else 'ranks'} {_listed(str(member.rank) for member in members)}"


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _forget_old_marks() -> None:
    for mark in Path(tempfile.gettempdir()).glob(f"{_MARK}*"):
        with suppress(OSError):  # belongs to another user, or was just removed by another process
            if time.time() - mark.stat().st_mtime > _OLD_S:
                mark.unlink()
