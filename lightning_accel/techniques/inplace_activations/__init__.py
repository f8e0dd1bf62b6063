"""In-place activations: ReLU, dropout and their kin overwrite their input, where that is proven to harm nobody."""

from lightning_accel.techniques.inplace_activations.ownership import prove_inputs_owned
from lightning_accel.techniques.inplace_activations.technique import InplaceActivations

__all__ = ["InplaceActivations", "prove_inputs_owned"]
