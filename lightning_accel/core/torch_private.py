"""Every name of torch's own that the library uses, one function each; nothing else in it has a leading underscore.

A function says why it is needed, since which torch the name is known, and what is done where it is missing. What a new
torch has dropped then fails in one test of tests/core/test_torch_private.py, which says in plain words what broke.
"""

from __future__ import annotations

from torch import Tensor

# -- sparse tensors ----------------------------------------------------------------------------------------------------


def coo_parts(tensor: Tensor) -> list[Tensor]:
    """The indices and the values of a sparse COO tensor: the memory that it has.

    ``_indices`` and ``_values`` are as old as sparse tensors (torch 0.2), and the only way to the memory of one that is
    not coalesced: ``indices()`` and ``values()`` refuse it, and ``coalesce()`` makes other memory. Where they are
    missing, a batch with such a tensor fails with the AttributeError, and coalesced ones go on.
    """
    if tensor.is_coalesced():
        return [tensor.indices(), tensor.values()]
    return [tensor._indices(), tensor._values()]
