"""The code in docs/xla.md runs: ``make test-xla``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch_xla", reason="needs torch_xla, in an environment of its own: make test-xla")

PAGE = Path(__file__).parents[2] / "docs" / "xla.md"


def test_the_code_in_the_page_runs() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "lightning-accel on XLA" in ran.stdout
    assert "programs compiled" in ran.stdout
