"""Programs of other people, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(
    tmp_path: Path, program: str, *command: str, timeout_s: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program by a command, as if it stood in a file of somebody's."""
    file = tmp_path / "test_program.py"
    file.write_text(program)
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    variables = {"PATH": "/usr/bin:/bin", "PYTHONPATH": path, "HOME": str(tmp_path)}
    return subprocess.run(
        [sys.executable, "-m", *command, str(file)],
        env=variables | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
