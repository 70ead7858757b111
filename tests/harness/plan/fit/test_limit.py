import pytest

from harness.errors import HarnessError
from harness.gpus.found import Gpus
from harness.plan.fit import Limit, find_limit, require_host_memory
from harness.plan.hardware import load_hardware
from tests.gpus import gpus_of


def test_a_typed_limit_goes_before_a_configured_one() -> None:
    assert find_limit("1MB", 5, "cpu", 1) == Limit(limit_bytes=10**6, origin="1MB", imposed=True)
    assert find_limit(None, 5, "cpu", 1) == Limit(limit_bytes=5, origin="runtime.memory_limit", imposed=True)


@pytest.mark.parametrize("text", ["0", "-1GB", "3 apples"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(HarnessError, match=f"--limit was given '{text}'"):
        find_limit(text, None, "cpu", 1)


def test_a_gpu_stands_for_what_its_allocator_can_serve() -> None:
    device = load_hardware().device("A100-40")
    limit = find_limit("a100-40", None, "cuda", 8)
    assert limit == Limit(limit_bytes=device.usable_bytes, origin="A100-40", imposed=True)


def test_an_unknown_gpu_is_refused_with_the_closest() -> None:
    with pytest.raises(HarnessError, match=r"--limit takes bytes such as 2GB, or a GPU: .*'A100-40' or"):
        find_limit("A100-41", None, "cuda", 1)


def test_the_cpu_needs_a_limit() -> None:
    with pytest.raises(HarnessError, match="such as --limit 2GB"):
        find_limit(None, None, "cpu", 2)


def test_ranks_must_fit_into_the_machine_together() -> None:
    limit = Limit(limit_bytes=3 * 10**9, origin="3GB", imposed=True)
    require_host_memory(limit, 2, 6 * 10**9)
    with pytest.raises(
        HarnessError, match=r"is 9.00 GB, but this machine has 6.00 GB; .*harness estimate --gpu"
    ):
        require_host_memory(limit, 3, 6 * 10**9)


def test_the_smallest_gpu_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpus_of(81559 * 2**20, 40960 * 2**20)
    monkeypatch.setattr("harness.plan.fit.find_gpus", lambda: found)
    limit = find_limit(None, None, "cuda", 2)
    assert limit == Limit(limit_bytes=40960 * 2**20, origin="memory of the GPU", imposed=False)


def test_without_gpus_their_memory_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    none = Gpus(why_none="this machine shows no GPU")
    monkeypatch.setattr("harness.plan.fit.find_gpus", lambda: none)
    with pytest.raises(
        HarnessError, match="this machine shows no GPU; give the memory of a rank with --limit"
    ):
        find_limit(None, None, "cuda", 1)
