"""``python -m simulated_cuda script.py …``: a script, on a machine with a simulated CUDA device."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from pathlib import Path

from simulated_cuda import device, faults
from simulated_cuda.native import UnavailableError


def main() -> int:
    """Runs the script that the command line names; its exit status, or 1 if there were faults."""
    if len(sys.argv) < 2:
        print("usage: python -m simulated_cuda script.py [arguments]", file=sys.stderr)
        return 2
    try:
        device.install()
    except UnavailableError as error:
        print(error, file=sys.stderr)
        return 2
    device.share()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))  # where Python looks for what a script imports
    runpy.run_path(sys.argv[0], run_name="__main__")
    for fault in faults.FOUND:
        print(f"simulated CUDA device: {fault}", file=sys.stderr)
    return 1 if faults.FOUND else 0


if __name__ == "__main__":
    status = main()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # autograd's threads are still there: a process that ends them with the interpreter may abort
