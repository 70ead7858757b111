"""What a link of another bandwidth would do to measured step times."""

from __future__ import annotations


def seconds_over_link(
    known_seconds: float, crossing_bytes: float, known_bandwidth: float, bandwidth: float
) -> float:
    """Step time, seconds, where nodes are joined by a link of `bandwidth` instead of `known_bandwidth`.

    T(w) = T(k) + B (1/w - 1/k), with B the bytes per step that one node sends to others and w, k the bus
    bandwidth in bytes per second that each link carries (`harness fabric`, all-reduce of the same ranks).
    All else is taken to stay: computing, what stays within a node, latency. Nothing that crosses is taken
    to hide behind computing beyond what hid on the known link, so the result is too high for a strategy
    that overlaps. This is the beta term of the usual alpha-beta model (Hockney 1994), as a difference.
    """
    return known_seconds + crossing_bytes * (1 / bandwidth - 1 / known_bandwidth)


def crossover_bandwidth(
    first: tuple[float, float], second: tuple[float, float], known_bandwidth: float
) -> float | None:
    """Bus bandwidth, bytes per second, at which two strategies take equally long; None: there is none.

    Each strategy is (T(k), B) as in `seconds_over_link`. Below the result the one with fewer bytes wins.
    """
    seconds, sent = first[0] - second[0], second[1] - first[1]
    if seconds * sent <= 0:
        return None
    return 1 / (seconds / sent + 1 / known_bandwidth)
