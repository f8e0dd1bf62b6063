"""Scripts that tests run in processes of their own: they start several ranks, or must not share ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_script(script: Path, folder: Path, *arguments: str, timeout_s: float = 600, **environment: str) -> str:
    """Runs ``python script folder *arguments`` in ``folder``; fails with what it printed unless it ends well.

    Returns:
        All that it printed.
    """
    command = [sys.executable, script, folder, *arguments]
    env = {**os.environ, **environment}
    run = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=folder, env=env)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr
