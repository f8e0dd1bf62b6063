"""``lightning-accel run``: a program keeps its arguments, pipes, signals and status, and gets its variables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_accel.cli.run_command import start_for
from lightning_accel.core.allocators import ENVIRONMENT_IN_FILE

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a program cannot be replaced by another on Windows")

VARIABLES = {"MALLOC_TRIM_THRESHOLD_": "1000000"}
HEAP_VARIABLES = ("LD_PRELOAD", "MALLOC_ARENA_MAX", "MALLOC_CONF", "GLIBC_TUNABLES", "PYTORCH_ALLOC_CONF")

TELLS = """
import json, os, sys
print(json.dumps({"argv": sys.argv, "name": __name__, "cwd": os.getcwd(), "path": sys.path[0], "pid": os.getpid(),
                  "variable": os.environ.get("MALLOC_TRIM_THRESHOLD_"), "stdin": sys.stdin.read()}))
sys.exit(int(os.environ.get("STATUS", "0")))
"""


@pytest.fixture
def answer(tmp_path: Path) -> str:
    """A configuration that tune has written, so that nothing has to be measured: its name."""
    (tmp_path / "accel.yaml").write_text(f"# {ENVIRONMENT_IN_FILE}{json.dumps(VARIABLES)}\naccel: {{}}\n")
    (tmp_path / "tells.py").write_text(TELLS)
    return "accel.yaml"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "lightning_accel", "run", *arguments]


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in HEAP_VARIABLES} | more


def ran(*arguments: str, stdin: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        input=stdin,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_program_runs_as_python_alone_would_run_it(answer: str, tmp_path: Path) -> None:
    done = ran("tells.py", "--config", answer, "with a space", "-x", "'\"$HOME", stdin="a line\nand another")
    told = json.loads(done.stdout)
    assert told["argv"] == ["tells.py", "--config", answer, "with a space", "-x", "'\"$HOME"]
    assert told["name"] == "__main__"
    assert told["cwd"] == told["path"] == str(tmp_path)
    assert told["stdin"] == "a line\nand another"
    assert done.returncode == 0


def test_a_module_runs_by_its_name(answer: str, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(TELLS)
    told = json.loads(ran("-m", "package.train", answer).stdout)
    assert told["name"] == "__main__"
    assert told["argv"] == [str(tmp_path / "package" / "train.py"), answer]


def test_the_variables_that_tune_has_found_are_there_and_said(answer: str) -> None:
    done = ran("tells.py", f"--config={answer}")
    assert json.loads(done.stdout)["variable"] == VARIABLES["MALLOC_TRIM_THRESHOLD_"]
    assert done.stderr == "lightning-accel run: MALLOC_TRIM_THRESHOLD_=1000000, by accel.yaml\n"


def test_what_the_user_has_set_stays_and_is_said(answer: str) -> None:
    done = ran("tells.py", answer, MALLOC_TRIM_THRESHOLD_="5")
    assert json.loads(done.stdout)["variable"] == "5"
    assert "MALLOC_TRIM_THRESHOLD_=5 is yours, and stays" in done.stderr


def test_the_status_of_the_program_is_that_of_the_command(answer: str) -> None:
    assert ran("tells.py", answer, STATUS="7").returncode == 7


def test_a_program_that_raises_shows_its_own_traceback_alone(answer: str, tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text("1 / 0\n")
    done = ran("raises.py", answer)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "run_command" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_the_program_itself(answer: str, tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "waits.py").write_text("""
import os, signal, sys, time
def handle(number, frame):
    print("heard", number, flush=True)
    sys.exit(3)
signal.signal(signal.SIGINT, handle)
signal.signal(signal.SIGTERM, handle)
print(os.getpid(), flush=True)
time.sleep(60)
""")
    with subprocess.Popen(
        command("waits.py", answer), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid  # no process stands between
        process.send_signal(number)
        assert process.stdout.readline() == f"heard {int(number)}\n"
        assert process.wait(timeout=60) == 3


def test_a_file_that_is_not_there_is_an_error_that_names_the_nearest(answer: str) -> None:
    done = ran("tell.py", answer)
    assert done.returncode == 2
    assert "there is no file 'tell.py'" in done.stderr
    assert "did you mean 'tells.py'?" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "which program?"),
        (("-m",), "which module?"),
        (("-m", "nopkg.mod"), "there is no module 'nopkg'"),
        (("--fast", "tells.py"), "'--fast' is no option"),
    ],
)
def test_a_call_without_a_program_is_an_error_that_shows_how(arguments: tuple[str, ...], message: str) -> None:
    done = ran(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "usage: lightning-accel run" in done.stderr


def test_a_library_of_another_machine_is_not_preloaded(answer: str, tmp_path: Path) -> None:
    text = f'# {ENVIRONMENT_IN_FILE}{{"LD_PRELOAD": "/nowhere/libjemalloc.so.2"}}\n'
    (tmp_path / "accel.yaml").write_text(text)
    done = ran("tells.py", answer, MALLOC_ARENA_MAX="2")
    assert "asks for /nowhere/libjemalloc.so.2, which is not on this machine" in done.stderr
    assert json.loads(done.stdout)["argv"] == ["tells.py", answer]


def test_with_nothing_to_choose_the_program_runs_all_the_same(answer: str) -> None:
    done = ran("tells.py", MALLOC_ARENA_MAX="2", CUDA_VISIBLE_DEVICES="")
    assert json.loads(done.stdout)["variable"] is None
    assert done.stderr == "lightning-accel run: MALLOC_ARENA_MAX=2 is yours, and stays\n"


@pytest.mark.skipif(sys.platform != "linux", reason="there are other allocators on Linux only")
def test_several_processes_do_not_measure_at_the_same_time(answer: str) -> None:
    first, second = (ran("tells.py", WORLD_SIZE="2", LOCAL_RANK=rank, CUDA_VISIBLE_DEVICES="") for rank in ("0", "1"))
    assert "`lightning-accel run --measure`" in first.stderr
    assert second.stderr == ""  # one of them says it
    assert json.loads(second.stdout)["argv"] == ["tells.py"]


def test_on_a_machine_with_a_gpu_segments_expand() -> None:
    """Asked of the machine at hand: with a GPU, what is set; without, that it is not."""
    start = start_for(["train.py"], {"MALLOC_ARENA_MAX": "2"}, measures=False)
    has_gpu = Path("/dev/nvidiactl").exists()
    assert (start.environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}) == has_gpu


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="there are other allocators on Linux only")
def test_a_machine_is_measured_once_and_the_answer_remembered(answer: str) -> None:
    done = subprocess.run(
        command("--measure"),
        env=environment(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0
    assert "page faults a step" in done.stderr
    later = ran("tells.py", CUDA_VISIBLE_DEVICES="")
    assert "measured on a stand-in for a training" in later.stderr
    assert "page faults" not in later.stderr  # nothing was measured again
    assert json.loads(later.stdout)["argv"] == ["tells.py"]
