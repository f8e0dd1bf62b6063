"""What a block needs, one way or another, is measured on copies of its arguments, and leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_accel.memory.costs import BlockCosts, kind_of, measure_block
from lightning_accel.memory.meter import meter_for
from lightning_accel.memory.offload import Offloader, Offloading

pytestmark = pytest.mark.numbers

ROWS, WIDTH = 64, 32
UNIT = ROWS * WIDTH * 4  # bytes of what enters and leaves the block


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


@pytest.fixture
def offloader() -> Iterator[Offloader]:
    made = Offloader(torch.device("cpu"), Offloading("disk", min_bytes=1024))
    yield made
    made.close()


def measured(block: nn.Module, x: Tensor, offloader: Offloader | None = None) -> BlockCosts:
    return measure_block(block, type(block).forward, (x,), {}, meter_for(torch.device("cpu")), offloader)


def test_what_is_kept_is_counted_by_every_policy(offloader: Offloader) -> None:
    torch.manual_seed(0)
    costs = measured(Block(), torch.randn(ROWS, WIDTH, requires_grad=True), offloader).by_policy
    kept = {policy: cost.kept_bytes / UNIT for policy, cost in costs.items()}
    # The norm's result, four of up's, four of gelu's, and dropout's noise.
    assert kept["keep"] == pytest.approx(10, abs=0.2)
    assert kept["full"] == pytest.approx(0, abs=0.7)  # a state of the random generator
    assert kept["full"] < kept["selective"] < kept["keep"]
    assert kept["offload"] < 0.2


def test_arguments_are_counted_apart(offloader: Offloader) -> None:
    costs = measured(Block(), torch.randn(ROWS, WIDTH, requires_grad=True), offloader).by_policy
    held = {policy: cost.argument_bytes for policy, cost in costs.items()}
    assert held == {"keep": UNIT, "selective": UNIT, "full": UNIT, "offload": 0, "full+offload": 0}


def test_what_recomputes_needs_its_activations_again_in_the_backward_pass() -> None:
    costs = measured(Block(), torch.randn(ROWS, WIDTH, requires_grad=True)).by_policy
    assert costs["full"].backward_bytes >= costs["keep"].backward_bytes + 9 * UNIT
    assert costs["keep"].forward_bytes >= costs["keep"].kept_bytes


def test_nothing_is_faster_than_keeping_everything() -> None:
    costs = measured(Block(), torch.randn(ROWS, WIDTH, requires_grad=True)).by_policy
    assert all(cost.ms >= costs["keep"].ms > 0 for cost in costs.values())


def test_saved_bytes_are_named_after_what_made_them() -> None:
    saved = measured(Block(), torch.randn(ROWS, WIDTH, requires_grad=True)).saved_by_operator
    assert saved["gelu"] == saved["addmm"] == 4 * UNIT
    assert saved["native_layer_norm"] == UNIT


def test_measuring_leaves_no_trace() -> None:
    block = Block()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    before, random_state = copy.deepcopy(block.state_dict()), torch.get_rng_state()
    measured(block, x)
    torch.testing.assert_close(block.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert x.grad is None
    assert all(parameter.grad is None for parameter in block.parameters())


def test_a_policy_that_fails_is_left_out() -> None:
    class Stubborn(Block):
        def forward(self, x: Tensor) -> Tensor:
            if torch._C._current_graph_task_id() != -1:
                raise RuntimeError("not in a backward pass")
            return super().forward(x)

    costs = measured(Stubborn(), torch.randn(ROWS, WIDTH, requires_grad=True))
    assert list(costs.by_policy) == ["keep"]


def test_equal_blocks_with_equal_arguments_are_of_one_kind() -> None:
    x = torch.randn(ROWS, WIDTH)
    assert kind_of(Block(), (x,), {}) == kind_of(Block(), (torch.randn(ROWS, WIDTH),), {})
    assert kind_of(Block(), (x,), {}) != kind_of(Block(), (x[:3],), {})
    assert kind_of(Block(), (x,), {}) != kind_of(Block().eval(), (x,), {})


def test_a_larger_call_costs_more() -> None:
    costs = measured(Block(), torch.randn(ROWS, WIDTH, requires_grad=True))
    twice = costs.of_call(2 * costs.argument_elements, shared_bytes=2 * UNIT)
    assert twice["keep"].kept_bytes == 2 * costs.by_policy["keep"].kept_bytes
    assert twice["keep"].forward_bytes == 2 * costs.by_policy["keep"].forward_bytes


def test_an_argument_counts_as_kept_where_no_other_call_holds_it() -> None:
    costs = measured(Block(), torch.randn(ROWS, WIDTH, requires_grad=True))
    alone, shared = (costs.of_call(costs.argument_elements, shared_bytes)["keep"] for shared_bytes in (0, UNIT))
    assert alone.kept_bytes == shared.kept_bytes + UNIT
