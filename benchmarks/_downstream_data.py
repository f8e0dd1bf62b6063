"""The data that :mod:`_downstream_models` are trained on: drawn, small, in the form that each library wants."""

from __future__ import annotations

import functools
import random
from typing import Any


@functools.cache
def frame(num_series: int = 8, length: int = 400) -> Any:
    """Waves with noise, one below the other, in neuralforecast's columns."""
    import numpy as np
    import pandas as pd

    drawn, hours = np.random.default_rng(0), np.arange(length)
    waves = [
        pd.DataFrame(
            {
                "unique_id": f"series {number}",
                "ds": pd.date_range("2024-01-01", periods=length, freq="h"),
                "y": 10 + np.sin(hours / 4 + number) + 0.1 * drawn.standard_normal(length),
            }
        )
        for number in range(num_series)
    ]
    return pd.concat(waves, ignore_index=True)


@functools.cache
def wave(length: int = 600) -> Any:
    """One, with noise, as darts has series."""
    import numpy as np
    from darts import TimeSeries

    noise = 0.1 * np.random.default_rng(0).standard_normal(length)
    return TimeSeries.from_values((np.sin(np.arange(length) / 4) + noise).astype(np.float32))


@functools.cache
def forecasting_data(covariates: bool) -> Any:
    """Six series of pytorch-forecasting's; with ``covariates`` of kinds and numbers that are known beforehand."""
    import numpy as np
    import pandas as pd
    from pytorch_forecasting import TimeSeriesDataSet

    drawn, days = np.random.default_rng(0), np.arange(120)
    table = pd.concat(
        [
            pd.DataFrame(
                {
                    "day": days,
                    "group": str(group),
                    "value": 5 + np.sin(days / 4 + group) + 0.1 * drawn.standard_normal(len(days)),
                    "price": np.cos(days / 9),
                    "weekday": [str(day % 7) for day in days],
                }
            )
            for group in range(6)
        ],
        ignore_index=True,
    )
    known: dict[str, Any] = {
        "static_categoricals": ["group"],
        "time_varying_known_reals": ["day", "price"],
        "time_varying_known_categoricals": ["weekday"],
    }
    return TimeSeriesDataSet(
        table,
        time_idx="day",
        target="value",
        group_ids=["group"],
        max_encoder_length=24,
        max_prediction_length=6,
        time_varying_unknown_reals=["value"],
        **(known if covariates else {}),
    )


@functools.cache
def molecules(number: int = 320) -> list[str]:
    """Chains, rings and branches at random, as SMILES."""
    drawn = random.Random(0)
    parts = ("C", "CC", "O", "N", "C(C)", "C(=O)", "c1ccccc1", "C1CCCCC1", "C(O)", "C(Cl)", "S", "C=C")
    return ["C" + "".join(drawn.choices(parts, k=drawn.randint(3, 8))) for _ in range(number)]


@functools.cache
def cells(number: int = 1000, genes: int = 200) -> Any:
    """Counts of genes, and of ten proteins, in two batches and three labels."""
    import numpy as np
    from anndata import AnnData

    drawn = np.random.default_rng(0)
    data = AnnData(drawn.negative_binomial(5, 0.5, (number, genes)).astype(np.float32))
    data.obs["batch"] = [f"batch {n % 2}" for n in range(number)]
    data.obs["label"] = [f"label {n % 4}" for n in range(number)]
    data.obsm["proteins"] = drawn.negative_binomial(5, 0.2, (number, 10)).astype(np.float32)
    return data


def graph(nodes: int, edges: int, features: int, labels: int) -> Any:
    """Of random edges, for torch_geometric; half of the nodes are to be trained with."""
    import torch
    from torch_geometric.data import Data

    drawn = torch.Generator().manual_seed(nodes)
    return Data(
        x=torch.randn(nodes, features, generator=drawn),
        edge_index=torch.randint(nodes, (2, edges), generator=drawn),
        y=torch.randint(4, (labels,), generator=drawn),
        train_mask=torch.arange(nodes) < nodes // 2,
    )
