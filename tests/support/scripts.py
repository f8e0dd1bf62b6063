"""Scripts that tests run in processes of their own: they start several ranks, or must not share ours."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

SUPPORT = Path(__file__).parent
"""The folder of the scripts that tests run in processes of their own."""

# To import these takes a script ten seconds, and its fork of a process that has them none. Nothing of ours is among
# them: what is under test is imported by the script, and only what is installed is found by Python 3.11's server.
PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "lightning.pytorch",
]


def run_script(
    script: Path, folder: Path, *arguments: str, timeout_s: float = 600, fresh: bool = False, **environment: str
) -> str:
    """Runs ``python script folder *arguments`` in ``folder``; fails with what it printed unless it ends well.

    Args:
        script: As its file.
        folder: Its first argument, and where it runs.
        arguments: Those after.
        timeout_s: It is killed then, with all that it started.
        fresh: Whether the interpreter has to be new, and libraries are to be loaded by the script. Where processes
            can be forked it is otherwise a fork of one that has loaded them, and in which variables that they read
            when they are loaded, ``OMP_NUM_THREADS`` say, are too late.
        environment: Variables, beside those of this process.

    Returns:
        All that it printed.
    """
    command = [str(script), str(folder), *arguments]
    env = {**os.environ, **environment}
    with tempfile.NamedTemporaryFile("r+", suffix=".log") as log:
        if fresh or "forkserver" not in multiprocessing.get_all_start_methods():
            python = [sys.executable, *command]
            where = {"cwd": folder, "env": env, "stdout": log, "stderr": subprocess.STDOUT}
            status = subprocess.run(python, timeout=timeout_s, check=False, **where).returncode
        else:
            status = _fork(command, folder, env, log.name, timeout_s)
        log.seek(0)
        printed = log.read()
    assert status == 0, printed
    return printed


def _fork(command: list[str], folder: Path, env: Mapping[str, str], log: str, timeout_s: float) -> int | None:
    """The exit status of the script, run in a fork of a server that is started with the first."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(PRELOADED)
    process = server.Process(target=_be, args=(command, folder, dict(env), log))
    process.start()
    try:
        process.join(timeout_s)
        if process.is_alive():
            raise subprocess.TimeoutExpired(command, timeout_s, Path(log).read_text())
        return process.exitcode
    finally:
        if process.is_alive():
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()


def _be(command: list[str], folder: Path, env: Mapping[str, str], log: str) -> None:
    """Makes this process what ``python *command`` would be."""
    os.setsid()  # the group that is killed with it
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # of the server's environment
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")
