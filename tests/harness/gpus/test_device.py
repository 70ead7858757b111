"""On what a run computes."""

import pytest

from harness.errors import HarnessError
from harness.gpus.found import Gpus, Sign, choose_device
from tests.gpus import gpus_of

NONE = Gpus(why_none="the driver is too old", signs=(Sign(vendor="NVIDIA", what="/dev/nvidiactl"),))


def having(monkeypatch: pytest.MonkeyPatch, gpus: Gpus) -> None:
    monkeypatch.setattr("harness.gpus.found.find_gpus", lambda: gpus)


def test_gpus_are_used_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, gpus_of(1, 2))
    chosen = choose_device("auto")
    assert (chosen.name, chosen.why) == ("cuda", "2 x NVIDIA A100-SXM4-80GB")
    assert choose_device("cpu").name == "cpu"


def test_the_cpu_in_place_of_gpus_is_surprising(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, NONE)
    chosen = choose_device("auto")
    assert (chosen.name, chosen.why, chosen.is_surprising) == ("cpu", "the driver is too old", True)
    having(monkeypatch, Gpus(why_none="this machine shows no GPU"))
    assert not choose_device("auto").is_surprising


def test_gpus_that_were_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, NONE)
    with pytest.raises(
        HarnessError, match=r"^no GPU can be used: the driver is too old; --set runtime\.device"
    ):
        choose_device("cuda")


def test_a_refusal_holds_unless_the_cpu_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, Gpus(refusal="found 4 XPU devices"))
    with pytest.raises(HarnessError, match="found 4 XPU devices; --set runtime"):
        choose_device("auto")
    assert choose_device("cpu").name == "cpu"
