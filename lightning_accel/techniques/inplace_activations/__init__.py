"""In-place activations: ReLU, dropout and their kin overwrite an input that nobody else can read."""

from lightning_accel.techniques.inplace_activations.technique import InplaceActivations

__all__ = ["InplaceActivations"]
