"""The processes of :mod:`rivals`' sides, each of which trains for a turn whenever it is told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from _rivals_sides import SIDES
from downstream import reason
from typing_extensions import Self

PATIENCE_S = 300.0  # beyond a run's limit, for what comes before its first step
CACHES = ("LIGHTNING_ACCEL_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HF_HOME")


class Turns:
    """A side's training of a model, in a process that finds nothing in any cache but what this side has left there.

    Args:
        side: Its name.
        asked: What ``_rivals_side.py`` is asked for. Of this, ``turn`` is how many steps there are to a turn.
        python: The interpreter.
    """

    def __init__(self, side: str, asked: dict[str, Any], python: str | None = None) -> None:
        self.side, self._asked, self._python = side, {**asked, "side": side}, python or sys.executable
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        self._printed = tempfile.TemporaryFile("w+", encoding="utf-8")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()
        self._printed.close()
        self._folder.cleanup()

    def turn(self) -> dict[str, Any] | None:
        """Has it train for a turn. Returns what it has measured once it has trained all its steps, or why it has not.

        What is run more than once is run to its end in the first turn, but for the last time.
        """
        if self._process is None:
            for _ in range(SIDES[self.side].runs - 1):
                self._start({**self._asked, "turn": 0})
                if (answer := self._answer()) and "at_s" not in answer:
                    return answer
            self._start(self._asked)
        else:
            assert self._process.stdin is not None
            with suppress(BrokenPipeError):  # it died in another's turn
                os.write(self._process.stdin.fileno(), b"\n")  # nothing may stay in a buffer, to fail once more
        return self._answer()

    def _start(self, asked: dict[str, Any]) -> None:
        folder = Path(self._folder.name)
        request, self._to = folder / "request.json", folder / "answer.json"
        self._to.unlink(missing_ok=True)
        request.write_text(json.dumps(asked), encoding="utf-8")
        caches = {variable: str(folder / variable.lower()) for variable in CACHES}
        caches["PYTORCH_AUTOTUNE_CACHE"] = str(folder / "autotune.json")
        self._process = subprocess.Popen(
            [self._python, str(Path(__file__).with_name("_rivals_side.py")), str(request), str(self._to)],
            cwd=folder,
            env={**os.environ, **caches},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            text=True,
            start_new_session=True,  # so that what it starts ends with it
        )

    def _answer(self) -> dict[str, Any] | None:
        """Waits until it ends, and returns what it tells; None if it hands its turn over before."""
        assert self._process is not None
        assert self._process.stdout is not None
        patience_s, was_late = self._asked["limit_s"] + PATIENCE_S, threading.Event()

        def end_it() -> None:
            was_late.set()
            self._kill()

        late = threading.Timer(patience_s, end_it)
        late.start()
        has_handed_over = any(line == "turn\n" for line in self._process.stdout)  # tools print, too
        late.cancel()
        late.join()
        if has_handed_over:
            return None
        self._process.wait()
        self._end()
        if self._to.exists():
            told: dict[str, Any] = json.loads(self._to.read_text(encoding="utf-8"))
            return told
        self._printed.seek(0)
        return {"failed": f"not done after {patience_s:g} s" if was_late.is_set() else reason(self._printed.read())}

    def _kill(self) -> None:
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _end(self) -> None:
        if self._process:
            with self._process:  # closes its pipes, and waits for it
                if self._process.poll() is None:
                    self._kill()
            self._process = None
