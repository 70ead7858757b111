"""What the allocator keeps: each stream its own blocks, and flat tensors that find no room in others."""

from benchmarks.published.reserved import Blocks, ReservingLedger, kept
from harness.forms.peak_memory.families import peak_moments
from tests.harness.forms.test_peak_memory import equal_blocks, job, profile


def test_streams_have_memory_of_their_own() -> None:
    """Reduced gradients come from another stream's blocks: what activations leave is no room for them."""
    workload = job("fsdp", equal_blocks(4, 10**6), 2)
    ledger = ReservingLedger(workload)
    found = peak_moments(workload, profile(), ledger)
    shards, gathered, gradient, sent = 3 * 8, 4, 4, 4
    ahead, reduced = 2 * 4, 8
    assert ledger.reserved == (shards + gathered + gradient + sent + ahead + reduced) * 10**6
    assert max(peak.bytes for peak in found.values()) < ledger.reserved


def test_the_smallest_free_piece_that_is_large_enough_serves() -> None:
    blocks = Blocks()
    large, small = blocks.take(40), blocks.take(20)
    blocks.give(large)
    blocks.give(small)
    assert blocks.take(15) is small
    assert (blocks.total, blocks.free) == (60, 45)
    assert blocks.take(30) is large
    assert blocks.take(11) is not small  # 5 and 10 are left, in two blocks
    assert (blocks.total, blocks.free) == (71, 15)


def test_free_neighbours_are_one_piece_again() -> None:
    blocks = Blocks()
    blocks.give(blocks.take(40))
    first, second = blocks.take(10), blocks.take(20)
    blocks.give(first)
    blocks.take(30)
    assert blocks.total == 70  # 10 and 10 lie apart
    blocks.give(second)
    blocks.take(40)
    assert (blocks.total, blocks.free) == (70, 0)


UPDATE = {
    "pieces": [10], "master": 4, "gradient": 2, "moments": 8, "copies": 0, "norm": 0, "small": 0,
    "copied_first": 4,
}  # fmt: skip


def test_flat_copies_of_a_sub_group_find_no_room_in_what_the_passes_left() -> None:
    """Masters and what they are copied from: 40 each, of which gradients take 20 and the passes 20 of
    their 25.
    Then flat gradients 20, wide ones 40, moments 80."""
    assert kept(**UPDATE, passes=25) == 40 + 40 + 5 + 40 + 80
    assert kept(**UPDATE, passes=0) == 40 + 40 + 40 + 80
    assert kept(**UPDATE | {"copies": 1}, passes=0) == kept(**UPDATE, passes=0) + 40


def test_small_tensors_find_room() -> None:
    """Twice 40, of which gradients take 20; 45 more of the passes; moments 80."""
    assert kept(**UPDATE | {"small": 100, "norm": 100}, passes=65) == 80 + 45 + 80


def test_a_copy_of_the_weights_in_their_own_dtype_leaves_a_smaller_block() -> None:
    """The copy's 20 serve gradients; flat gradients break the buffer's 40, so that wide ones need 40."""
    assert kept(**UPDATE | {"copied_first": 2}, passes=0) == 20 + 40 + 40 + 40 + 80
