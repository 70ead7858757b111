import pytest

from harness.rank.live.observer import DIGESTED_STEPS, Observer
from harness.rank.probes.communication import CommunicationCounter
from harness.rank.probes.device_memory import AllocatorProbe, allocator_probe
from harness.rank.probes.probes import Probes
from harness.rank.probes.tracer import Tracer


def test_a_tracer_at_work_in_a_timed_step_is_told() -> None:
    tracer = Tracer("cpu", None)
    probes = Probes(allocator_probe("cpu"), CommunicationCounter(), tracer, Observer())
    probes.begin_step(0, "timed")
    assert "tracer" not in probes.timed_probes
    tracer.start()
    probes.begin_step(1, "traced")
    assert "tracer" not in probes.timed_probes
    probes.begin_step(2, "timed")
    tracer.stop()
    assert "tracer" in probes.timed_probes


@pytest.mark.parametrize(("step", "told"), [(DIGESTED_STEPS - 1, {"observer"}), (DIGESTED_STEPS, set())])
def test_a_timed_step_that_is_looked_at_more_closely_is_told(step: int, told: set[str]) -> None:
    observer = Observer()
    probes = Probes(AllocatorProbe(), CommunicationCounter(), Tracer("cpu", None), observer)
    observer.begin_step(step)
    probes.begin_step(step, "timed")
    observer.end_step(0.0)
    assert probes.timed_probes == told
