"""A run whose loggers are other people's: ``python other_boards.py FOLDER wandb|mlflow`` prints what they were told."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

from lightning_accel.callbacks import SpeedMemoryLogger
from support.live_runs import Timed, fit, simulated


def main(folder: Path, kind: str) -> None:
    os.chdir(folder)
    os.environ["LIGHTNING_ACCEL_CACHE"] = str(folder / "remembered")
    logger: Any
    if kind == "wandb":
        logger = WandbLogger(save_dir=folder, project="tests", offline=True)
    else:
        logger = MLFlowLogger(tracking_uri=f"file:{folder}/mlruns")
    with simulated(1.5) as time:
        notes = fit(Timed(time), logger=logger, callbacks=[SpeedMemoryLogger()]).report.notes
    if kind == "wandb":
        run = logger.experiment
        told = {"config": dict(run.config), "summary": {name: run.summary[name] for name in run.summary.keys()}}  # noqa: SIM118
        run.finish()
    else:
        data = logger.experiment.get_run(logger.run_id).data
        told = {"config": data.params, "summary": data.metrics}
    print(json.dumps({"notes": notes, **told}, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
