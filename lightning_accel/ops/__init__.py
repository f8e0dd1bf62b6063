"""Array functions for NumPy, CuPy and torch. Results are arrays of the inputs' library, without copies between
libraries. Tensors keep their gradients.
"""

from lightning_accel.ops import gaussian
from lightning_accel.ops.sliding import batched_matmul, sliding_matmul, windows
from lightning_accel.ops.sparse import density, sparse_relu, to_coo, to_csr

__all__ = ["batched_matmul", "density", "gaussian", "sliding_matmul", "sparse_relu", "to_coo", "to_csr", "windows"]
