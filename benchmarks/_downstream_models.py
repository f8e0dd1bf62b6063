"""What :mod:`downstream` trains: models of libraries that are built on Lightning, on drawn data.

An entry of :data:`MODELS` makes a fit as its library documents it: given more arguments for the Trainer, it makes a new
model, and returns a call that trains it. The Trainers have their libraries' defaults, but for what prints and what
writes checkpoints. A library is imported when one of its models is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from _downstream_data import cells, forecasting_data, frame, graph, molecules, wave

Arguments = dict[str, Any]  # of a Trainer
Fit = Callable[[], object]

PLAIN = "plain"
FITS = ("fresh", "second", "new process")  # of a side, in their order: two of one process, and the third
SETTINGS: dict[str, Arguments] = {"defaults": {}, "32-true": {"precision": "32-true"}}  # of the plugin
QUIET: Arguments = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
UNSAVED: Arguments = {**QUIET, "devices": 1, "enable_checkpointing": False}


# -- neuralforecast ----------------------------------------------------------------------------------------------------


def neural(name: str, steps: int, refits: int = 0, **settings: Any) -> Callable[[Arguments], Fit]:
    """A fit of one of neuralforecast's models, or a cross-validation that fits it ``refits`` times."""

    def build(added: Arguments) -> Fit:
        from neuralforecast import NeuralForecast, models

        sizes = {"h": 12, "input_size": 48, "max_steps": steps, "windows_batch_size": 32}
        model = getattr(models, name)(**sizes, **settings, **QUIET, **added)
        forecast = NeuralForecast([model], freq="h")
        if refits:
            return lambda: forecast.cross_validation(frame(), n_windows=refits, step_size=12, refit=True)
        return lambda: forecast.fit(frame())

    return build


# -- darts -------------------------------------------------------------------------------------------------------------


def darts(name: str, epochs: int, **settings: Any) -> Callable[[Arguments], Fit]:
    """A fit of one of darts' models."""

    def build(added: Arguments) -> Fit:
        from darts import models

        if "training_length" not in settings:
            settings["output_chunk_length"] = 12
        model = getattr(models, name)(
            input_chunk_length=36, n_epochs=epochs, pl_trainer_kwargs={**QUIET, **added}, **settings
        )
        return lambda: model.fit(wave())

    return build


# -- pytorch-forecasting -----------------------------------------------------------------------------------------------


def forecasting(name: str, epochs: int, covariates: bool = True, **settings: Any) -> Callable[[Arguments], Fit]:
    """A fit of one of pytorch-forecasting's models."""

    def build(added: Arguments) -> Fit:
        import pytorch_forecasting
        from lightning.pytorch import Trainer

        data = forecasting_data(covariates)
        model = getattr(pytorch_forecasting, name).from_dataset(data, log_interval=-1, **settings)
        loader = data.to_dataloader(train=True, batch_size=32, num_workers=0)
        return lambda: Trainer(max_epochs=epochs, gradient_clip_val=0.1, **UNSAVED, **added).fit(model, loader)

    return build


# -- chemprop ----------------------------------------------------------------------------------------------------------


def chemprop(classes: bool, epochs: int) -> Callable[[Arguments], Fit]:
    """A fit of chemprop's message passing, of one number or of two classes."""

    def build(added: Arguments) -> Fit:
        import numpy as np
        from chemprop import data, models, nn
        from lightning.pytorch import Trainer

        lengths = [float(len(smiles)) for smiles in molecules()]
        targets = np.array([float(length > 14) if classes else length / 20 for length in lengths])
        points = [data.MoleculeDatapoint.from_smi(smi, [y]) for smi, y in zip(molecules(), targets, strict=True)]
        loader, validation = (
            data.build_dataloader(data.MoleculeDataset(part), batch_size=32, shuffle=shuffled, num_workers=0)
            for part, shuffled in ((points[:256], True), (points[256:], False))
        )
        head = nn.BinaryClassificationFFN() if classes else nn.RegressionFFN()
        model = models.MPNN(nn.BondMessagePassing(), nn.MeanAggregation(), head)
        return lambda: Trainer(max_epochs=epochs, **UNSAVED, **added).fit(model, loader, validation)

    return build


# -- scvi-tools --------------------------------------------------------------------------------------------------------


def single_cell(name: str, epochs: int, setup: dict[str, str], **settings: Any) -> Callable[[Arguments], Fit]:
    """A fit of one of scvi-tools' models."""

    def build(added: Arguments) -> Fit:
        from scvi import model

        kind = getattr(model, name)
        kind.setup_anndata(cells(), **setup)
        made = kind(cells(), **settings)
        return lambda: made.train(max_epochs=epochs, batch_size=128, **QUIET, **added)

    return build


# -- torch_geometric ---------------------------------------------------------------------------------------------------


def classifier(net: Any, loss_of: Callable[[Any, Any], Any]) -> Any:
    """A LightningModule around ``net``, as torch_geometric's examples have it."""
    import torch
    from lightning.pytorch import LightningModule

    class Classifier(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = loss_of(self.net, batch)
            self.log("train_loss", loss, batch_size=1)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Classifier()


def node_graph(name: str, epochs: int, **settings: Any) -> Callable[[Arguments], Fit]:
    """A fit on one graph as a whole, a step an epoch."""

    def loss_of(net: Any, batch: Any) -> Any:
        from torch.nn.functional import cross_entropy

        out = net(batch.x, batch.edge_index)
        return cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])

    def build(added: Arguments) -> Fit:
        from lightning.pytorch import Trainer
        from torch_geometric.data.lightning import LightningNodeData
        from torch_geometric.nn import models

        whole = graph(nodes=1500, edges=6000, features=64, labels=1500)
        data = LightningNodeData(whole, input_train_nodes=whole.train_mask, loader="full")
        net = getattr(models, name)(64, 32, num_layers=2, out_channels=4, dropout=0.5, **settings)
        module = classifier(net, loss_of)
        return lambda: Trainer(max_epochs=epochs, **UNSAVED, **added).fit(module, datamodule=data)

    return build


def small_graphs(name: str, epochs: int, **settings: Any) -> Callable[[Arguments], Fit]:
    """A fit on many graphs in batches of 32, each graph with a label."""

    def loss_of(net: Any, batch: Any) -> Any:
        from torch.nn.functional import cross_entropy
        from torch_geometric.nn import global_add_pool

        return cross_entropy(global_add_pool(net(batch.x, batch.edge_index), batch.batch), batch.y)

    def build(added: Arguments) -> Fit:
        from lightning.pytorch import Trainer
        from torch_geometric.data.lightning import LightningDataset
        from torch_geometric.nn import models

        graphs = [graph(nodes=10 + n % 20, edges=60, features=16, labels=1) for n in range(640)]
        data = LightningDataset(graphs, batch_size=32, num_workers=0)
        module = classifier(getattr(models, name)(16, 32, num_layers=3, out_channels=4, **settings), loss_of)
        return lambda: Trainer(max_epochs=epochs, **UNSAVED, **added).fit(module, datamodule=data)

    return build


# ----------------------------------------------------------------------------------------------------------------------

NARROW = {"mlp_units": [[64, 64]] * 3}
BATCHES = {"batch_key": "batch"}
LABELS = {"labels_key": "label", "unlabeled_category": "unknown"}
PROTEINS = {"protein_expression_obsm_key": "proteins"}
MODELS: dict[str, Callable[[Arguments], Fit]] = {
    "neuralforecast NHITS 5 steps": neural("NHITS", 5, **NARROW),
    "neuralforecast NHITS 100 steps": neural("NHITS", 100, **NARROW),
    "neuralforecast NHITS 400 steps": neural("NHITS", 400, **NARROW),
    "neuralforecast NHITS 8 refits": neural("NHITS", 20, refits=8, **NARROW),
    "neuralforecast NBEATS": neural("NBEATS", 200, **NARROW),
    "neuralforecast DLinear": neural("DLinear", 400),
    "neuralforecast LSTM": neural("LSTM", 150, encoder_hidden_size=32, decoder_hidden_size=32),
    "neuralforecast TFT": neural("TFT", 40, hidden_size=16),
    "neuralforecast PatchTST": neural(
        "PatchTST", 40, patch_len=8, stride=4, hidden_size=32, n_heads=4, linear_hidden_size=64
    ),
    "darts NBEATS": darts("NBEATSModel", 10, num_stacks=4, layer_widths=64),
    "darts TCN": darts("TCNModel", 12),
    "darts Transformer": darts("TransformerModel", 3, d_model=16, dim_feedforward=64),
    "darts LSTM": darts("RNNModel", 15, model="LSTM", training_length=48),
    "darts TiDE": darts("TiDEModel", 15),
    "darts NLinear": darts("NLinearModel", 20),
    "pytorch-forecasting TFT": forecasting("TemporalFusionTransformer", 2, hidden_size=8, hidden_continuous_size=4),
    "pytorch-forecasting NBeats": forecasting("NBeats", 3, covariates=False, widths=[32, 128]),
    "pytorch-forecasting DeepAR": forecasting("DeepAR", 4, hidden_size=16),
    "pytorch-forecasting LSTM": forecasting("RecurrentNetwork", 5, hidden_size=16),
    "chemprop regression": chemprop(classes=False, epochs=4),
    "chemprop classification": chemprop(classes=True, epochs=4),
    "scvi-tools SCVI": single_cell("SCVI", 15, BATCHES),
    "scvi-tools SCANVI": single_cell("SCANVI", 8, BATCHES | LABELS),
    "scvi-tools LinearSCVI": single_cell("LinearSCVI", 20, BATCHES),
    "scvi-tools TOTALVI": single_cell("TOTALVI", 8, BATCHES | PROTEINS),
    "torch_geometric GCN one graph": node_graph("GCN", 150),
    "torch_geometric GAT one graph": node_graph("GAT", 100, heads=4),
    "torch_geometric GraphSAGE one graph": node_graph("GraphSAGE", 150),
    "torch_geometric GIN batches": small_graphs("GIN", 5),
    "torch_geometric GCN batches": small_graphs("GCN", 5),
}
"""By title, whose first word is the library's name on PyPI."""
OWN_PRECISION = frozenset(("darts",))
"""Libraries that tell the Trainer its precision, so that no plugin may: there the strategy ``accel`` is asked for."""
