from harness.worker.communication import CommunicationCounter
from harness.worker.memory import allocator_probe
from harness.worker.probes import Probes
from harness.worker.tracer import Tracer


def test_a_tracer_at_work_in_a_timed_step_is_told() -> None:
    tracer = Tracer("cpu", None)
    probes = Probes(allocator_probe("cpu"), CommunicationCounter(), tracer)
    probes.begin_step(0, "timed")
    assert "tracer" not in probes.timed_probes
    tracer.start()
    probes.begin_step(1, "traced")
    assert "tracer" not in probes.timed_probes
    probes.begin_step(2, "timed")
    tracer.stop()
    assert "tracer" in probes.timed_probes
