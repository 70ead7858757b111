import pytest

from harness.rank.live.observer import DIGESTED_STEPS, Observer
from harness.rank.probes.communication import CommunicationCounter
from harness.rank.probes.memory import AllocatorProbe, allocator_probe
from harness.rank.probes.probes import Probes
from harness.rank.probes.tracer import Tracer
from harness.rank.shells import Instrument, Shells, Step


def test_a_tracer_at_work_in_a_timed_step_is_told() -> None:
    tracer = Tracer("cpu", None)
    probes = Probes(allocator_probe("cpu"), CommunicationCounter(), tracer, Observer())
    probes.prepare(Step(number=0, window="timed"))
    assert "tracer" not in probes.timed_probes
    tracer.start()
    probes.prepare(Step(number=1, window="traced"))
    assert "tracer" not in probes.timed_probes
    probes.prepare(Step(number=2, window="timed"))
    tracer.stop()
    assert "tracer" in probes.timed_probes


@pytest.mark.parametrize(("step", "told"), [(DIGESTED_STEPS - 1, {"observer"}), (DIGESTED_STEPS, set())])
def test_a_timed_step_that_is_looked_at_more_closely_is_told(step: int, told: set[str]) -> None:
    observer = Observer()
    probes = Probes(AllocatorProbe(), CommunicationCounter(), Tracer("cpu", None), observer)
    observer.prepare(Step(number=step, since_first=step))
    probes.prepare(Step(number=step, window="timed"))
    observer.facts()
    assert probes.timed_probes == told


class Noting(Instrument):
    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def prepare(self, step: Step) -> None:
        self.told.append(f"prepare {self.name}")

    def enter(self, phase: str, last: bool) -> None:
        self.told.append(f"{phase} {self.name}")

    def facts(self) -> dict[str, str]:
        return {"known": self.name, self.name: ""}


def test_shells_are_prepared_from_without_and_told_from_within() -> None:
    told: list[str] = []
    shells = Shells([Noting("outer", told), Noting("inner", told)])
    shells.prepare(Step(number=0))
    shells.enter("forward")
    assert told == ["prepare outer", "prepare inner", "forward inner", "forward outer"]
    assert shells.facts() == {"known": "inner", "inner": "", "outer": ""}
