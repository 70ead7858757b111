"""Events of a step become a profile: sizes by divisibility, what is held, and the fullest points."""

import pytest

from harness.forms.activations import Size
from harness.rank.probes.activation_trace import Replay, size_of

B, S = 1021, 503


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (4096, (4096, 0, 0, 0, 0, 0)), (16 * B * S, (0, 0, 0, 16, 0, 0)), (2 * S, (0, 0, 2, 0, 0, 0)),
        (3 * B * S * S, (0, 0, 0, 0, 0, 3)), (8 * B * (S - 1), (0, -8, 0, 8, 0, 0)),
    ],
)  # fmt: skip
def test_a_size_shows_its_factors(count: int, expected: tuple[int, ...]) -> None:
    assert size_of(count, B, S) == Size(expected)


def test_a_block_holds_what_it_saved_until_its_own_backward_pass() -> None:
    """One block saves 4 b s, makes a temporary of 2 b s and a gradient of 100 bytes."""
    replay = Replay(B, S, blocks=1)
    replay.mark("forward", 0)
    replay.mark("forward", 1)
    replay.allocate(1, 4 * B * S, "mlp")
    replay.allocate(2, 2 * B * S, "mlp")
    replay.free(2)
    for kind, segment in (("forward", 2), ("forward", 3), ("backward", 3), ("backward", 2), ("backward", 1)):
        replay.mark(kind, segment)
    replay.allocate(3, 100, "mlp")
    replay.free(1)
    replay.ready("mlp.weight", 3)
    replay.mark("backward", 0)
    profile = replay.profile()
    block = profile.block
    assert block.held == block.forward_growth == Size((0, 0, 0, 4, 0, 0))
    assert [(s.module, str(s.size)) for s in block.saved] == [("mlp", "4 b s")]
    assert [str(point.live) for point in block.forward] == ["6 b s"]
    assert [str(point.live) for point in block.backward] == ["100 + 4 b s"]
    assert [g.parameter for g in block.gradients] == ["mlp.weight"]
    assert profile.kept == Size()
