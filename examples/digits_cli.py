"""The digits example, configured in YAML with ``AccelCLI``: Lightning's own command line, and a section ``accel:``.

    python examples/digits_cli.py fit --config examples/config.yaml

Before a long run, let it find the fastest settings for this machine, and train with them:

    python examples/digits_cli.py tune --config examples/config.yaml --time 3min
    python examples/digits_cli.py fit --config examples/config.yaml --config accel.yaml
"""

from __future__ import annotations

from digits import Digits, DigitsNet
from lightning_accel import AccelCLI


def main() -> None:
    AccelCLI(DigitsNet, Digits, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
