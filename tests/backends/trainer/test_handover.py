"""A library's loop on a thread works only while its caller waits."""

from __future__ import annotations

import threading

import pytest
import torch

from harness.backends.trainer.engines import GivenRates, Handover


class Doubling:
    """A loop that answers each number with its double, and notes how it ended."""

    def __init__(self) -> None:
        self.handover = Handover(self.loop)
        self.unwound = False
        self.thread: int | None = None

    def loop(self) -> None:
        self.thread = threading.get_ident()
        given = self.handover.answer("ready")
        try:
            while True:
                given = self.handover.answer(2 * given)
        finally:
            self.unwound = True


def test_the_two_sides_take_turns() -> None:
    doubling = Doubling()
    assert doubling.thread is None  # it has not begun
    assert doubling.handover.call() == "ready"
    assert [doubling.handover.call(number) for number in (1, 2, 3)] == [2, 4, 6]
    assert doubling.thread != threading.get_ident()
    doubling.handover.end()
    assert doubling.unwound


def test_what_the_loop_raises_reaches_the_caller() -> None:
    doubling = Doubling()
    doubling.handover.call()
    with pytest.raises(TypeError, match="unsupported operand"):
        doubling.handover.call(None)
    assert doubling.unwound


def test_a_loop_that_ends_by_itself_is_an_error() -> None:
    handover = Handover(lambda: None)
    with pytest.raises(RuntimeError, match="ended before its last step"):
        handover.call()


def test_a_loop_that_never_began_can_be_ended() -> None:
    Handover(lambda: pytest.fail("it began")).end()


def test_a_stepped_scheduler_leaves_the_rates_that_were_given() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    rates = GivenRates(optimizer)
    for given in (0.1, 0.3, 0.2):
        optimizer.param_groups[0]["lr"] = given
        optimizer.step()
        rates.step()
        assert optimizer.param_groups[0]["lr"] == given
    assert rates.get_last_lr() == [0.2]
    assert rates.steps_taken == 3
