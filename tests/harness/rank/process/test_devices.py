"""Each rank has a GPU of its own."""

from harness.rank.process.environment import shared_device


def test_ranks_on_devices_of_their_own() -> None:
    assert shared_device(["a@one", "b@one", "a@two", "b@two"]) is None


def test_ranks_on_one_device_are_named_with_it() -> None:
    refusal = shared_device(["a@one", "b@one", "b@one"])
    assert refusal is not None
    assert refusal.startswith("ranks 1, 2 would share GPU b of one; give each its own")
