"""Other processes: what they are told and say, and that nothing of them is left, however they end."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from lightning_accel.experiment.subprocess_runner import Subprocess, SubprocessError, Worker
from support.source_tree import library

ON_POSIX = pytest.mark.skipif(sys.platform == "win32", reason="groups of processes are POSIX's")

CONNECT = "from lightning_accel.experiment.subprocess_runner import connect, serve_forks\nimport os, sys, time\n"
ADDS = (
    CONNECT
    + """
with connect() as parent:
    while True:
        parent.send(sum(parent.recv()))
"""
)
FORKS = (
    CONNECT
    + """
def work(message, connection):
    connection.send((message, os.getpid()))
    connection.recv()
    os._exit(3)
serve_forks(work)
"""
)
ENDS_AS_A_FORK = """
import os
from lightning_accel.experiment import subprocess_runner
connect, connected = subprocess_runner.connect, []
def connect_once():
    if connected:
        os._exit(3)
    connected.append(True)
    return connect()
subprocess_runner.connect = connect_once
subprocess_runner.serve_forks(print)
"""
STARTS_ANOTHER = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path("child").write_text(str(child.pid))
"""


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def is_gone(pid: int) -> bool:
    """Whether a process ends within a while: the system takes a moment to end what was killed."""
    try:
        for _ in range(1000):
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
            time.sleep(0.01)
    except psutil.NoSuchProcess:
        return True
    return False


def child_of(folder: Path) -> int:
    while not (folder / "child").exists() or not (folder / "child").read_text():
        time.sleep(0.01)
    return int((folder / "child").read_text())


def test_a_program_ends_by_itself_with_its_status_and_its_last_lines(tmp_path: Path) -> None:
    program = "import os, sys; print('one'); print(os.getcwd(), os.environ.get('GIVEN'), flush=True); sys.exit('two')"
    with Subprocess(python(program), environment={**os.environ, "GIVEN": "yes"}, folder=tmp_path) as process:
        assert process.wait() == 1
        assert process.last_lines(2) == [f"{tmp_path} yes", "two"]


@ON_POSIX
@pytest.mark.parametrize("heeds", [True, False], ids=["heeds SIGTERM", "ignores SIGTERM"])
def test_a_program_ends_with_all_that_it_has_started(tmp_path: Path, heeds: bool) -> None:
    ignores = "" if heeds else "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    process = Subprocess(python(f"{ignores}\n{STARTS_ANOTHER}\ntime.sleep(60)"), folder=tmp_path)
    child = child_of(tmp_path)
    process.end(patience_s=60.0 if heeds else 0.5)
    assert is_gone(child)
    assert process.wait() == (-signal.SIGTERM if heeds else -signal.SIGKILL)


@ON_POSIX
def test_an_interruption_ends_the_program() -> None:
    with pytest.raises(KeyboardInterrupt), Subprocess(python("import time; time.sleep(60)")) as process:
        raise KeyboardInterrupt
    assert process.wait() == -signal.SIGTERM


def test_a_worker_answers_until_it_is_ended() -> None:
    with Worker(ADDS, patience_s=60) as worker:
        assert worker.ask([1, 2]) == 3
        assert worker.ask([3, 4]) == 7
    assert worker.wait() == -signal.SIGKILL


def test_a_worker_that_ends_early_says_why() -> None:
    said = pytest.raises(SubprocessError, match="ended at once: RuntimeError: no such device")
    with Worker("raise RuntimeError('no such device')", patience_s=60) as worker, said:
        worker.ask(1)
    with Worker(ADDS, patience_s=60) as worker, pytest.raises(SubprocessError, match="ended with status 1"):
        worker.ask("no numbers")


@pytest.mark.medium
def test_a_worker_that_does_not_answer_is_ended() -> None:
    with Worker(CONNECT + "parent = connect(); time.sleep(60)", patience_s=2) as worker:
        with pytest.raises(SubprocessError, match="did not answer within 2 s") as late:
            worker.ask(1)
        assert late.value.is_late
        assert worker.wait() == -signal.SIGKILL


def test_a_worker_that_never_connects_is_given_up() -> None:
    said = pytest.raises(SubprocessError, match="did not begin within 0 s: it said nothing")
    with Worker("import time; time.sleep(60)", patience_s=0.5) as worker, said:
        worker.ask(1)


@pytest.mark.skipif(sys.platform != "linux", reason="only there are workers forked")
def test_forks_are_told_apart_and_end_alone() -> None:
    with Worker(FORKS, patience_s=60) as worker, worker.fork("a") as first, worker.fork("b") as second:
        (a, first_pid), (b, second_pid) = first.answer(), second.answer()
        assert (a, b) == ("a", "b")
        assert first_pid != second_pid
        first.end()
        assert is_gone(first_pid)
        with pytest.raises(SubprocessError, match="ended with status 3") as ended:
            second.ask("go on")
        assert not ended.value.is_memory


@pytest.mark.skipif(sys.platform != "linux", reason="only there are workers forked")
def test_a_fork_that_the_system_has_killed_asked_for_too_much_memory() -> None:
    with Worker(FORKS, patience_s=60) as worker, worker.fork("a") as fork:
        os.kill(fork.answer()[1], signal.SIGKILL)
        with pytest.raises(SubprocessError) as ended:
            fork.answer()
        assert ended.value.is_memory


@pytest.mark.skipif(sys.platform != "linux", reason="only there are workers forked")
def test_a_fork_that_ends_before_it_connects_leaves_its_worker_as_it_was() -> None:
    with Worker(ENDS_AS_A_FORK, patience_s=60) as worker:
        for _ in range(2):
            with pytest.raises(SubprocessError, match="ended at once"):
                worker.fork("a")


# -- who may do it by himself --------------------------------------------------------------------------------------

OTHERS = {
    "cli/revisions.py": "asks git, which answers at once and starts nothing",
    "cli/run_command.py": "becomes the program; on Windows, which cannot, it waits for it on the user's terminal",
}
"""Who starts processes beside the runner, and why."""


def test_only_the_runner_starts_processes() -> None:
    users = {found.file for found in library().imports if found.module == "subprocess"}
    assert users == {"experiment/subprocess_runner.py", *OTHERS}
    forks = {file for file, text in library().sources.items() if "os.fork(" in text or "os.killpg" in text}
    assert forks == {"experiment/subprocess_runner.py"}
