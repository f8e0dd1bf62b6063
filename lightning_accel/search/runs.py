"""A run on trial, as the searching process sees it."""

from __future__ import annotations

from typing import Any

from lightning_accel.experiment.subprocess_runner import SubprocessError, Worker
from lightning_accel.search.worker import Block, Failed, Ready


class TrialRun:
    """One training under a setup, which waits between two blocks of turns.

    Raises:
        SubprocessError: The training does not start.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.is_over = False  # whether it has ended
        self.ready: Ready = self._answer()  # its message once it was warm
        self.most_bytes: int = self.ready.peak_bytes  # peak memory, including the first steps

    def block(self, turns: int) -> Block:
        """Trains for so many turns.

        Raises:
            SubprocessError: The run has ended.
        """
        self._worker.send(turns)
        answer: Block = self._answer()
        self.most_bytes = max(self.most_bytes, answer.peak_bytes)
        return answer

    def close(self) -> None:
        """Ends the run, and waits until its memory is free."""
        self.is_over = True
        self._worker.end()

    def _answer(self) -> Any:
        try:
            answer = self._worker.answer()
            if isinstance(answer, Failed):
                raise SubprocessError(answer.message, is_memory=answer.is_memory)
        except SubprocessError:
            self.is_over = True
            raise
        return answer
