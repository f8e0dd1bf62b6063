"""What breaks when a torch drops one of the private names that the library uses, in plain words: a test a name."""

from __future__ import annotations

import torch

from lightning_accel.core.torch_private import coo_parts

# -- sparse tensors ----------------------------------------------------------------------------------------------------


def test_the_memory_of_a_sparse_tensor_that_is_not_coalesced_can_be_reached() -> None:
    """``_indices``, ``_values``. Without, the pipeline cannot hand such a tensor from its stream to the consumer's."""
    indices, values = torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0])
    twice = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True)
    assert [part.tolist() for part in coo_parts(twice)] == [[[1, 1]], [2.0, 3.0]]
    assert coo_parts(twice)[1].data_ptr() == values.data_ptr()
    assert [part.tolist() for part in coo_parts(twice.coalesce())] == [[[1]], [5.0]]
