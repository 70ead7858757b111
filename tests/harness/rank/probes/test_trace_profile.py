"""Events of a step become a profile: sizes by divisibility, what is held, and the fullest points."""

from __future__ import annotations

import pytest

from harness.forms.activations import Size
from harness.rank.probes.activation_trace import Event, profile_of_events, size_of

B, S = 1021, 503


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (4096, (4096, 0, 0, 0, 0, 0)),
        (16 * B * S, (0, 0, 0, 16, 0, 0)),
        (2 * S, (0, 0, 2, 0, 0, 0)),
        (3 * B * S * S, (0, 0, 0, 0, 0, 3)),
        (8 * B * (S - 1), (0, -8, 0, 8, 0, 0)),
    ],
)
def test_a_size_shows_its_factors(count: int, expected: tuple[int, ...]) -> None:
    assert size_of(count, B, S) == Size(expected)


def _events() -> list[Event]:
    """One block that saves 4 b s, makes a temporary of 2 b s and a gradient of 100 bytes."""
    found = [Event(kind="mark", name="forward embedding")]

    def allocate(number: int, count: int) -> None:
        found.append(Event(kind="allocate", storage=number, bytes=count, module="mlp"))

    def free(number: int) -> None:
        found.append(Event(kind="free", storage=number))

    def mark(name: str) -> None:
        found.append(Event(kind="mark", name=name))

    mark("forward 0")
    allocate(1, 4 * B * S)
    allocate(2, 2 * B * S)
    free(2)
    mark("forward 1")
    mark("forward 2")
    mark("backward 2")
    mark("backward 1")
    mark("backward 0")
    allocate(3, 100)
    free(1)
    found.append(Event(kind="ready", storage=3, name="mlp.weight"))
    mark("backward embedding")
    return found


def test_a_block_holds_what_it_saved_until_its_own_backward_pass() -> None:
    profile = profile_of_events(_events(), batch=B, sequence=S, blocks=1)
    block = profile.block
    assert block.held == block.forward_growth == Size((0, 0, 0, 4, 0, 0))
    assert [(s.module, str(s.size)) for s in block.saved] == [("mlp", "4 b s")]
    assert [str(point.live) for point in block.forward] == ["6 b s"]
    assert [str(point.live) for point in block.backward] == ["100 + 4 b s"]
    assert [g.parameter for g in block.gradients] == ["mlp.weight"]
    assert profile.kept == Size()
