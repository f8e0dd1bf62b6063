"""``lightning-accel bench``, in a repository of git that has a training in it.

Most tests train without torch: a loop of sleeps that leaves a record as a Trainer's callback does, in milliseconds.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_accel.__main__ import main
from lightning_accel.cli.revisions import Repository as WorkingTree

TRAIN = """
import os, sys, time
from pathlib import Path
from lightning_accel.evidence.events import EpochEnded, RunEnded, RunStarted, StepMeasured
from lightning_accel.evidence.record import RecordWriter
import speed

def step():
    begun = time.perf_counter()
    time.sleep(speed.MS / 1e3)
    return 1e3 * (time.perf_counter() - begun)

print("training", *sys.argv[1:])
with open("log.txt", "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
writer = RecordWriter(
    Path(os.environ["LIGHTNING_ACCEL_RECORD"], "accel", "1-run.jsonl"),
    RunStarted(
        started="2026-11-23T12:00:00+00:00", command=sys.argv, model=speed.MODEL, parameters=1, settings=None,
        precision="32-true", strategy="SingleDeviceStrategy", machine=getattr(speed, "MACHINE", "a CPU"), cores=1,
        world_size=1, versions={}, source_folders=[str(Path(speed.__file__).resolve().parent)],
    ),
)
ms = [step() for _ in range(8)]
writer.write(StepMeasured(first=1, last=8, timed=8, cycle_ms=ms, wait_ms=[0.0] * 8, samples=32, losses=[(8, 1.0)]))
writer.write(EpochEnded(peak_memory_mib=speed.MIB, peak_memory_source="the allocator"))
writer.write(RunEnded(status="finished"))
"""


@dataclass
class Repository:
    """Of git, with a commit on the branch ``main``."""

    folder: Path

    def write(self, path: str, text: str) -> Path:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def speed(self, ms: float = 1.0, mib: float = 100.0, model: str = "mine.Model", path: str = "speed.py") -> None:
        self.write(path, f"MS, MIB, MODEL = {ms}, {mib}, {model!r}\n")

    def git(self, *arguments: str) -> str:
        names = [part for role in ("user.name=me", "user.email=me@here") for part in ("-c", role)]
        command = ["git", *names, "-c", "commit.gpgsign=false", *arguments]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=True).stdout

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--message", "Change")

    def assert_untouched(self) -> None:
        """No checkout is left, and git remembers none."""
        assert len(self.git("worktree", "list").splitlines()) == 1


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    made = Repository(tmp_path / "repository")
    made.write(".gitignore", "log.txt\ndata/\n__pycache__/\n")
    made.write("train.py", TRAIN)
    made.speed()
    made.git("init", "--initial-branch", "main")
    made.commit()
    monkeypatch.chdir(made.folder)
    return made


@pytest.fixture
def environment() -> Iterator[pytest.MonkeyPatch]:
    """Its variables are put right before the test is asked what it has left behind."""
    with pytest.MonkeyPatch.context() as patched:
        yield patched


Said = Callable[[], tuple[str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Said:
    def read() -> tuple[str, str]:
        captured = capsys.readouterr()
        return captured.out, captured.err

    return read


def found_by(said: Said, *arguments: str) -> dict[str, Any]:
    assert main(["bench", "train.py", "--against", "main", "--json", *arguments]) in (0, 1)
    found: dict[str, Any] = json.loads(said()[0])
    return found


@pytest.mark.medium
def test_the_working_tree_is_set_beside_the_other_revision(repository: Repository, said: Said) -> None:
    repository.speed(ms=10.0, mib=150.0)
    found = found_by(said, "--runs", "4")
    assert found["b"].endswith("with changes that are not committed)")
    assert (found["runs"], found["speed"]["unit"], found["memory"]["ratio"]) == (4, "samples", pytest.approx(1.5))
    assert found["speed"]["interval"][1] < 0.9
    assert [len(each) for each in found["speed"]["each_per_second"]] == [4, 4]
    repository.assert_untouched()


@pytest.mark.medium
def test_they_take_turns_after_a_first_run_of_each(repository: Repository, said: Said) -> None:
    assert main(["bench", "train.py", "--runs", "3", "--against", "main"]) == 0
    out, err = said()
    sides = [line.split(": ")[2][0] for line in err.splitlines()]
    assert [sorted(sides[at : at + 2]) for at in range(0, 8, 2)] == [["A", "B"]] * 4  # in an order by a coin
    assert err.count("to fill caches") == 2
    assert "samples/s" in out
    assert "too few runs for an interval" in out


@pytest.mark.medium
def test_options_stand_anywhere_and_all_else_is_the_programs(repository: Repository) -> None:
    given = ["train.py", "--lr", "1", "--runs", "1", "-x", "two words", "--against", "main", "--", "--runs", "7"]
    assert main(["bench", *given]) == 0
    assert set((repository.folder / "log.txt").read_text().splitlines()) == {"--lr 1 -x two words --runs 7"}


@pytest.mark.medium
@pytest.mark.parametrize(("ms", "mib", "worse"), [(10.0, 100.0, "speed"), (1.0, 150.0, "memory")])
def test_a_gate_stops_what_is_slower_or_larger(
    repository: Repository, said: Said, ms: float, mib: float, worse: str
) -> None:
    repository.speed(ms, mib)
    assert main(["bench", "train.py", "--against", "main", "--runs", "4", "--gate", "25%", "--markdown"]) == 1
    out, _ = said()
    assert f"- {worse}: B is worse than A by more than 25%" in out
    assert out.startswith("**B trains at ")
    assert "(4 runs of each, intervals of 97.1%)" in out
    assert "| samples/s |" in out


@pytest.mark.medium
def test_a_gate_lets_what_is_faster_pass(repository: Repository) -> None:
    repository.speed(ms=10.0)
    repository.commit()
    repository.speed(ms=1.0)
    assert main(["bench", "train.py", "--against", "HEAD", "--runs", "4", "--gate", "25%"]) == 0


def test_a_gate_that_so_few_runs_cannot_serve_is_refused_before_any(repository: Repository, said: Said) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "train.py", "--against", "main", "--runs", "3", "--gate", "3%"])
    assert "takes --runs 4 or more; given: 3" in said()[1]


def test_a_program_that_fails_shows_its_last_lines_and_its_status(repository: Repository, said: Said) -> None:
    repository.write("train.py", "import sys\nprint('the data are gone')\nsys.exit(7)\n")
    assert main(["bench", "train.py", "--against", "main"]) == 2
    _, err = said()
    assert "B (working tree" in err
    assert "ended with status 7:\n  | the data are gone" in err
    repository.assert_untouched()


def test_a_program_that_leaves_no_record_says_what_it_needs(repository: Repository, said: Said) -> None:
    repository.write("train.py", "print('trained')\n")
    assert main(["bench", "train.py", "--against", "main"]) == 2
    assert "left no record: its Trainer needs AccelPlugin() in its plugins or SpeedMemoryLogger()" in said()[1]


@pytest.mark.medium
def test_different_models_are_not_compared(repository: Repository, said: Said) -> None:
    repository.speed(model="mine.Other")
    assert main(["bench", "train.py", "--against", "main", "--runs", "1"]) == 2
    assert "The model is not the same" in said()[1]


@pytest.mark.medium
def test_the_same_code_is_called_so(repository: Repository, said: Said) -> None:
    found = found_by(said, "--runs", "1")
    assert found["b"].endswith(", the same code)")
    assert found["worse"] == []


@pytest.mark.medium
def test_of_several_fits_the_last_one_counts_and_that_is_said(repository: Repository, said: Said) -> None:
    nine = TRAIN.replace("range(8)", "range(9)").replace("last=8, timed=8", "last=9, timed=9")
    repository.write("train.py", TRAIN + nine.replace("1-run.jsonl", "2-second.jsonl"))
    repository.commit()
    assert main(["bench", "train.py", "--against", "main", "--runs", "1"]) == 0
    assert "9 steps, the last of 2 fits" in said()[1]


@pytest.mark.medium
def test_the_workflow_of_the_docs_runs(repository: Repository, environment: pytest.MonkeyPatch, said: Said) -> None:
    page = (Path(__file__).parents[2] / "docs" / "comparing.md").read_text(encoding="utf-8")
    workflow = yaml.safe_load(page.partition("```yml\n")[2].partition("```")[0])
    commands = [step["run"] for step in workflow["jobs"]["bench"]["steps"] if "run" in step]
    (command,) = [one for one in commands if one.startswith("lightning-accel bench")]
    repository.git("update-ref", "refs/remotes/origin/main", "HEAD")
    environment.setenv("GITHUB_BASE_REF", "main")
    _, *arguments = shlex.split(os.path.expandvars(command.partition(">")[0]))
    assert main(arguments) in (0, 1)
    assert said()[0].startswith("**B trains at ")


@pytest.mark.medium
def test_a_gate_takes_one_machine(repository: Repository, said: Said) -> None:
    repository.write("speed.py", "MS, MIB, MODEL, MACHINE = 1.0, 100.0, 'mine.Model', 'a GPU'\n")
    assert main(["bench", "train.py", "--against", "main", "--runs", "4", "--gate", "3%"]) == 2
    assert "A gate needs one machine: A ran on a CPU, B on a GPU" in said()[1]


def test_a_revision_that_is_not_there_is_said_with_the_nearest(repository: Repository, said: Said) -> None:
    assert main(["bench", "train.py", "--against", "mian"]) == 2
    assert "has no revision 'mian'; did you mean 'main'?" in said()[1]


def test_a_branch_that_only_the_remote_has_is_named(repository: Repository, said: Said) -> None:
    repository.git("update-ref", "refs/remotes/origin/release", "HEAD")
    assert main(["bench", "train.py", "--against", "release"]) == 2
    assert "did you mean 'origin/release'?" in said()[1]


def test_a_folder_without_git_is_said(
    repository: Repository, tmp_path: Path, environment: pytest.MonkeyPatch, said: Said
) -> None:
    environment.chdir(tmp_path)
    environment.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "train.py").write_text(TRAIN)
    assert main(["bench", "train.py", "--against", "main"]) == 2
    assert "not a git repository" in said()[1]


def test_a_program_that_the_other_revision_lacks_is_said(repository: Repository, said: Said) -> None:
    repository.write("new.py", TRAIN)
    assert main(["bench", "new.py", "--against", "main"]) == 2
    assert "has no 'new.py'" in said()[1]


@pytest.mark.medium
def test_a_module_in_a_folder_below_runs_from_there(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    repository.write("project/package/train.py", TRAIN)
    repository.speed(path="project/speed.py")
    repository.commit()
    repository.speed(ms=10.0, path="project/speed.py")
    monkeypatch.chdir(repository.folder / "project")
    assert main(["bench", "-m", "package.train", "--against", "main", "--runs", "4", "--json"]) == 0
    assert json.loads(said()[0])["speed"]["interval"][1] < 0.9


@pytest.mark.medium
def test_packages_on_the_working_trees_path_come_from_the_checkout_in_it(
    repository: Repository, environment: pytest.MonkeyPatch, said: Said
) -> None:
    repository.git("mv", "speed.py", "src.py")
    repository.speed(path="src/speed.py")
    repository.commit()
    repository.speed(ms=10.0, path="src/speed.py")
    environment.setenv("PYTHONPATH", str(repository.folder / "src"), prepend=os.pathsep)
    assert found_by(said, "--runs", "4")["speed"]["interval"][1] < 0.9


def test_projects_that_are_installed_from_the_working_tree_come_from_the_checkout(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As pip notes down that ``pip install -e`` was used."""
    origin = {"url": repository.folder.as_uri(), "dir_info": {"editable": True}}
    noted = tmp_path / "site" / "mine-1.0.dist-info"
    noted.mkdir(parents=True)
    (noted / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (noted / "direct_url.json").write_text(json.dumps(origin))
    checkout = tmp_path / "checkout"
    with WorkingTree.around(repository.folder).checked_out("main", checkout), monkeypatch.context() as patched:
        patched.setattr(sys, "path", ["", str(tmp_path / "site")])
        patched.delenv("PYTHONPATH", raising=False)
        assert WorkingTree.around(repository.folder).python_path(checkout) == str(checkout)


def test_code_of_the_working_tree_in_the_other_revisions_run_is_found_out(repository: Repository, said: Said) -> None:
    repository.write("train.py", f"import sys\nsys.path.insert(0, {str(repository.folder)!r})\n{TRAIN}")
    repository.commit()
    assert main(["bench", "train.py", "--against", "main"]) == 2
    assert f"ran code of the working tree, in {repository.folder.resolve()}." in said()[1]


def test_the_index_of_a_hook_of_git_is_left_alone(repository: Repository, environment: pytest.MonkeyPatch) -> None:
    repository.speed(ms=2.0)
    repository.git("mv", "speed.py", "moved.py")
    repository.commit()
    environment.setenv("GIT_INDEX_FILE", str(repository.folder / ".git" / "index"))  # as git sets it for them
    assert main(["bench", "train.py", "--against", "HEAD~1"]) == 2  # there is no speed.py here
    assert repository.git("status", "--porcelain") == ""


def test_a_checkout_within_the_repository_is_refused(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(repository.folder))
    assert main(["bench", "train.py", "--against", "main"]) == 2
    assert "have TMPDIR name a folder elsewhere" in said()[1]


@pytest.mark.medium
def test_data_that_git_does_not_know_are_shared_and_survive(repository: Repository, said: Said) -> None:
    repository.write("train.py", f"open('data/numbers.txt').read()\n{TRAIN}")
    repository.commit()
    data = repository.write("data/numbers.txt", "1 2 3")
    assert main(["bench", "train.py", "--against", "main", "--runs", "1"]) == 2
    assert "--link data" in said()[1]
    assert main(["bench", "train.py", "--against", "main", "--runs", "1", "--link", "data"]) == 0
    assert data.read_text() == "1 2 3"
    repository.assert_untouched()


@pytest.mark.parametrize(("link", "complaint"), [("nowhere", "no such file"), ("speed.py", "has its own")])
def test_a_link_that_cannot_be_is_refused(repository: Repository, said: Said, link: str, complaint: str) -> None:
    assert main(["bench", "train.py", "--against", "main", "--link", link]) == 2
    assert complaint in said()[1]
    repository.assert_untouched()


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_program_and_nothing_is_left(
    repository: Repository, tmp_path: Path, number: signal.Signals, status: int
) -> None:
    started = tmp_path / "started"
    repository.write(
        "train.py", f"import os, time\nopen({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    )
    repository.commit()
    # A shell that starts pytest in the background has what it starts ignore Ctrl-C.
    heeds = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    starts = f"import sys; {heeds}; from lightning_accel.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", starts, "bench", "train.py", "--against", "main"]
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL) as process:
        while not (started.exists() and started.read_text()):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(timeout=60) == status
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)
    repository.assert_untouched()
    assert not list(tmp_path.glob("lightning-accel-bench-*"))


LIGHTNING_TRAIN = """
import time
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from lightning_accel.callbacks import SpeedMemoryLogger
from speed import MS

class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        time.sleep(MS / 1e3)
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

torch.manual_seed(0)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(accelerator="cpu", max_epochs=2, callbacks=[SpeedMemoryLogger()], **quiet)
trainer.fit(Model(), DataLoader(torch.ones(80, 8), batch_size=4))
"""


@pytest.mark.slow
def test_two_real_trainings_without_a_logger_are_compared(repository: Repository, said: Said) -> None:
    repository.write("train.py", LIGHTNING_TRAIN)
    repository.commit()
    repository.speed(ms=30.0)
    found = found_by(said, "--runs", "2")
    assert found["speed"]["ratio"] < 0.5
    assert found["loss"]["shift"] == 0  # the same seed, the same numbers
    assert found["memory_mib"] is not None
    assert "forward" in found["parts_ms"]
    assert not (repository.folder / "accel").exists()
