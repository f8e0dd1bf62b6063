"""``make gpu-bench`` and the like end in time, and say what is left: scripts that sleep stand for those of a GPU."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path

import pytest

import on_gpu

SCRIPTS = {
    "quick": "(out / 'quick.json').write_text('1')",
    "slow": "try:\n    time.sleep(60)\nfinally:\n    (out / 'slow.json').write_text('so far')",
    "later": "(out / 'later.json').write_text('2')",
}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One whose benchmarks are those above."""
    for folder in ("lightning_accel", "callbacks", "benchmarks/claims"):
        (tmp_path / folder).mkdir(parents=True)
    for name, lines in SCRIPTS.items():
        begin = "import sys, time\nfrom pathlib import Path\nout = Path(sys.argv[sys.argv.index('--out') + 1])\n"
        (tmp_path / "benchmarks" / f"{name}.py").write_text(f"{begin}{lines}\n", encoding="utf-8")
    monkeypatch.setattr(on_gpu, "ROOT", tmp_path)
    monkeypatch.setattr(on_gpu, "BENCHMARKS", tuple(SCRIPTS))
    return tmp_path


def status_of(out: Path, *arguments: str, limit_s: float = 60) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIMIT_S", str(limit_s))
        patch.setattr(sys, "argv", ["on_gpu.py", *arguments, "--out", str(out)])
        with pytest.raises(SystemExit) as ended:
            on_gpu.main()
    return ended.value.code


@pytest.mark.medium
def test_a_part_ends_in_time_and_names_the_command_for_what_is_left(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(tmp_path / "out", "bench", limit_s=3) == 1
    assert "on_gpu: 3 s were too few for slow, later. Run: make gpu-bench ONLY=slow,later" in capsys.readouterr().out
    with tarfile.open(tmp_path / "out" / "gpu-bench.tar.gz") as archive:  # what a script has so far is worth having
        assert archive.getnames() == ["quick.json", "slow.json"]


def test_a_part_that_is_done_says_nothing_more(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(tmp_path / "out", "bench", "--only", "quick,later") == 0
    assert "on_gpu:" not in capsys.readouterr().out


@pytest.mark.medium
def test_the_tests_of_a_part_share_its_time(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that capture come last."""
    tests = checkout / "tests"
    tests.mkdir()
    (checkout / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['gpu']\n", encoding="utf-8")
    body = "import time\nimport pytest\n\n@pytest.mark.gpu\ndef test_it():\n    time.sleep(60)\n"
    for name in ("test_memory.py", "test_graphs.py"):
        (tests / name).write_text(body, encoding="utf-8")
    monkeypatch.setattr(on_gpu, "TESTS", tests)
    monkeypatch.setattr(on_gpu, "has", lambda module: False)
    assert status_of(tmp_path / "out", "tests", limit_s=6) == 1
    said = capsys.readouterr().out
    assert "too few for tests, graphs. Run: make gpu-tests PART=<a folder of tests/>, the last with PART=graphs" in said
    assert (tmp_path / "out" / "gpu-tests.xml").exists()
