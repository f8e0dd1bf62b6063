"""Scripts and tests on the simulated device, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulated_cuda.programs import run

pytestmark = pytest.mark.simulated_gpu

TRAIN = """
import torch
layer = torch.nn.Linear(4, 4).cuda()
layer(torch.ones(2, 4, device="cuda")).sum().backward()
print(layer.weight.grad.device, layer.bias.grad.tolist())
"""

RACE = """
import torch
x, stream = torch.zeros(4, device="cuda").add_(1), torch.cuda.Stream()
with torch.cuda.stream(stream):
    y = x * 2
"""


def test_a_script_runs_to_its_end_and_its_process_ends_quietly(tmp_path: Path) -> None:
    """Autograd's threads are still there then, and must not be ended by force."""
    ended = run(tmp_path, TRAIN, "simulated_cuda")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split() == ["cuda:0", "[2.0,", "2.0,", "2.0,", "2.0]"]


def test_a_script_finds_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("import torch; print(torch.ones(1, device='cuda').device)")
    ended = run(tmp_path, "import neighbour", "simulated_cuda")
    assert (ended.returncode, ended.stdout.strip()) == (0, "cuda:0"), ended.stderr


def test_the_processes_that_a_script_starts_have_the_device_too(tmp_path: Path) -> None:
    asked = "import torch; print(torch.cuda.is_available())"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {asked!r}])"
    assert run(tmp_path, program, "simulated_cuda").stdout.strip() == "True"


def test_a_script_that_races_is_told_and_fails(tmp_path: Path) -> None:
    ended = run(tmp_path, RACE, "simulated_cuda")
    assert ended.returncode == 1
    assert "aten.mul.Tensor on stream 1 of cuda:0 reads what aten.add_.Tensor" in ended.stderr


def test_a_test_that_races_fails(tmp_path: Path) -> None:
    indented = RACE.replace("\n", "\n    ")
    program = f"def test_it():{indented}\ndef test_other():\n    import torch\n    assert torch.cuda.is_available()\n"
    ended = run(tmp_path, program, "pytest", "-p", "simulated_cuda.plugin", "-q", "-p", "no:cacheprovider")
    assert ended.returncode == 1
    assert "would race" in ended.stdout
    assert "1 failed, 1 passed" in ended.stdout


def test_the_environment_chooses_the_card(tmp_path: Path) -> None:
    program = (
        "import torch; print(torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1], torch.cuda.device_count())"
    )
    card = {"SIMULATED_CUDA_CAPABILITY": "7.5", "SIMULATED_CUDA_GIB": "0.5", "SIMULATED_CUDA_DEVICES": "2"}
    assert run(tmp_path, program, "simulated_cuda", **card).stdout.split() == ["Tesla", "T4", str(2**29), "2"]


@pytest.mark.parametrize("command", [("simulated_cuda",), ("pytest", "-p", "simulated_cuda.plugin")])
def test_without_a_compiler_it_says_what_is_missing(tmp_path: Path, command: tuple[str, ...]) -> None:
    program = "def test_it():\n    import torch\n    assert not torch.cuda.is_available()\n"
    ended = run(tmp_path, program, *command, PATH=str(tmp_path), TMPDIR=str(tmp_path))
    assert "is built by g++, which is not on the PATH" in ended.stdout + ended.stderr
    assert ended.returncode == (2 if command == ("simulated_cuda",) else 0)
