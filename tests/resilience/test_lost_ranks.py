"""A run that breaks off says which rank is the reason."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from lightning_accel.resilience.lost_ranks import (
    Member,
    Roster,
    explain,
    is_broken_collective,
    name_lost_ranks,
)
from support.scripts import SUPPORT, run_script

HERE = socket.gethostname()
CLOSED = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]")


@pytest.fixture(autouse=True)
def _marks_in_a_folder_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


# Processes that lose one of theirs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of ``lost_ranks_runs.py`` left what each rank was told."""
    folder = tmp_path_factory.mktemp("lost_ranks")
    run_script(SUPPORT / "resilience" / "lost_ranks_runs.py", folder, TMPDIR=str(folder))
    return folder


def told(folder: Path, run: str, rank: int) -> tuple[str, str]:
    """The lost rank's pid, and the text of this rank's error."""
    pid, _, text = (folder / f"{run}.{rank}.txt").read_text().partition("\n")
    return pid, text


@pytest.mark.medium
@pytest.mark.parametrize("run", ["killed", "failed"])
@pytest.mark.parametrize("rank", [0, 2])
def test_the_others_end_with_an_error_that_names_the_rank(folder: Path, run: str, rank: int) -> None:
    pid, text = told(folder, run, rank)
    assert text.startswith("[")  # gloo's own
    assert f"\nRank 1 (pid {pid} on host {HERE}) has died; ranks 0 and 2 cannot go on without it." in text


@pytest.mark.medium
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_a_rank_that_broke_off_because_of_another_is_not_taken_for_the_reason(folder: Path, rank: int) -> None:
    pid, text = told(folder, "killed, seen late", rank)
    assert f"\nRank 1 (pid {pid} on host {HERE}) has died; ranks 0, 2 and 3 cannot go on without it." in text


@pytest.mark.medium
@pytest.mark.parametrize("rank", [0, 2])
def test_where_nobody_has_died_the_timeout_is_what_is_named(folder: Path, rank: int) -> None:
    _, text = told(folder, "hung", rank)
    assert f"\nNo rank on this host, {HERE}, has died. If none has, one took longer over its part" in text
    assert "timeout=" in text


# Who lives


def test_a_process_that_has_ended_and_was_not_waited_for_is_lost() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    member = replace(Member.here(), pid=process.pid, started=psutil.Process(process.pid).create_time())
    assert member.lives()
    process.kill()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert not member.lives()
    process.communicate()
    assert not member.lives()


def test_another_process_with_the_same_number_is_not_the_one() -> None:
    assert Member.here().lives()
    assert not replace(Member.here(), started=Member.here().started - 60).lives()


def test_ranks_on_other_hosts_are_not_asked() -> None:
    own = Member.here()
    gone = replace(own, rank=1, started=0.0)
    assert Roster([own, gone, replace(gone, rank=2, host="b")], own).lost() == [gone]


def test_a_run_of_one_process_has_nothing_to_say() -> None:
    roster = Roster.gather()
    assert roster.members == [roster.own]
    assert explain(CLOSED, roster) is None


# What is said


def two_hosts(*gone: int) -> Roster:
    own = Member.here()
    members = [replace(own, rank=rank, host=HERE if rank < 3 else "b") for rank in range(5)]
    return Roster([replace(one, started=0.0) if one.rank in gone else one for one in members], own)


def test_several_lost_ranks_are_all_named() -> None:
    said = explain(CLOSED, two_hosts(1, 2))
    pid = os.getpid()
    assert said is not None
    assert said.startswith(
        f"Ranks 1 (pid {pid} on host {HERE}) and 2 (pid {pid} on host {HERE}) have died; ranks 0, 3 and 4 cannot"
    )


def test_where_all_live_here_the_other_hosts_are_named() -> None:
    said = explain(CLOSED, two_hosts(), patience_s=0.0)
    assert said is not None
    assert said.startswith(f"No rank on this host, {HERE}, has died. Look at the output of those on b (ranks 3 and 4).")


def test_what_is_said_is_added_to_the_exception() -> None:
    error = dist.DistNetworkError("Broken pipe")
    name_lost_ranks(error, two_hosts(1))
    assert str(error).startswith("Broken pipe\nRank 1 (pid")


@pytest.mark.parametrize(
    "error",
    [
        CLOSED,
        RuntimeError("[../gloo/gloo/transport/tcp/pair.cc:553] Read error [10.0.0.1]:1: Connection reset by peer"),
        RuntimeError("[../gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation"),
        dist.DistBackendError("NCCL error: remote process exited or there was a network error"),
        dist.DistNetworkError("The client socket has timed out"),
        RuntimeError("Application timeout caused pair closure"),
    ],
    ids=lambda error: str(error)[-30:],
)
def test_errors_of_broken_collectives_are_known(error: Exception) -> None:
    assert is_broken_collective(error)


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError("NCCL error: invalid usage. Duplicate GPU detected : rank 0 and rank 1"),
        RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"),
        RuntimeError("Timed out waiting for the licence server"),
        ConnectionResetError("Connection reset by peer"),
        ValueError("the user's own"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_other_errors_stay_as_they_are(error: BaseException) -> None:
    before = error.args
    name_lost_ranks(error, two_hosts(1))
    assert error.args == before
    assert not os.listdir(tempfile.gettempdir())


def test_marks_of_runs_long_ago_are_removed(tmp_path: Path) -> None:
    explain(CLOSED, two_hosts(1))
    (mark,) = tmp_path.iterdir()
    Roster.gather()
    assert mark.exists()
    os.utime(mark, (0, 0))
    Roster.gather()
    assert not mark.exists()
