"""The clean matrix: backends on devices of the stub equal the reference.

One of each family in bf16-mixed on 2 ranks, some in fp16-mixed, and some that group 4 ranks; the rest is
exhaustive (through Trainer: test_trainer.py, test_adapters.py). `tests/traps/test_clean.py` has all that run
on the CPU.
A class for each, so that they can run side by side.
"""

from collections.abc import Collection

import pytest

from harness.judge.comparison import Comparison
from harness.judge.facts import BY_KEY
from harness.judge.rows import JudgedRun
from tests.gpu_stub import log
from tests.gpu_stub.machine import Machine
from tests.gpu_stub.matrix import RANKS, clean_comparison, findings, labels, settings, unsupported
from tests.representatives import EXHAUSTIVE
from tests.traps.clean import FEW, FORMS

pytestmark = pytest.mark.long(seconds=200)

ON_CUDA_ALONE = ("accelerate-fsdp", "accelerate-fsdp1")


def trained(comparison: Comparison, asked: Collection[str]) -> list[JudgedRun]:
    """Rows on several ranks; those asked for ran, all but those that cannot."""
    of_ranks = [row for row in comparison.rows if row.record.world.world_size > 1]
    found = [row for row in of_ranks if row.record.status == "ok"]
    (nproc,) = {row.record.world.world_size for row in of_ranks}
    (precision,) = {row.record.job.training.precision for row in of_ranks}
    assert {row.label for row in found} == set(asked) - unsupported(precision, nproc).keys()
    return found


class Clean:
    """What holds in every precision."""

    precision: str
    parity = frozenset({"exact", "tight", "band"})
    few: tuple[str, ...] = ()

    @pytest.fixture(params=RANKS)
    def comparison(self, request: pytest.FixtureRequest, machine: Machine) -> Comparison:
        return clean_comparison(machine, request.param, self.precision)

    @property
    def asked(self) -> Collection[str]:
        return self.few or labels(self.precision)

    def test_every_backend_runs_unless_it_cannot_be(self, comparison: Comparison) -> None:
        (nproc,) = {row.record.world.world_size for row in comparison.rows} - {1}
        rows = {row.label: row.record for row in comparison.rows}
        refused = {label: record for label, record in rows.items() if record.status == "unsupported"}
        reasons = unsupported(self.precision, nproc)
        wanted = {label: reasons[label] for label in self.asked if label in reasons}
        assert refused.keys() == wanted.keys()
        for label, record in refused.items():
            (reason,) = record.reasons
            assert wanted[label] in reason
        failed = {label: r.error for label, r in rows.items() if r.status not in ("ok", "unsupported")}
        assert failed == {}

    def test_it_equals_the_reference_without_a_finding(self, comparison: Comparison) -> None:
        assert [(found.id, found.message) for found in findings(comparison)] == []
        assert {row.judgement.parity for row in trained(comparison, self.asked)} <= self.parity

    def test_states_and_bytes_equal_the_closed_forms(self, comparison: Comparison) -> None:
        wrong = {}
        for row in trained(comparison, self.asked):
            pairs = [[BY_KEY[key].read(row.run, row.judgement) for key in form] for form in FORMS]
            if any(None in pair or pair[0] != pair[1] for pair in pairs):
                wrong[row.label] = pairs
        assert wrong == {}

    def test_the_stub_of_nccl_counts_the_same_bytes(self, comparison: Comparison, machine: Machine) -> None:
        for row in trained(comparison, self.asked):
            folder = machine.run_directory(row.record)
            for part in row.record.ranks:
                assert (counted := log.counted_collectives(folder, part.rank)), row.label
                assert log.told_collectives(row.record, part.rank) == counted, row.label

    def test_memory_is_that_of_torchs_statistics_and_of_the_device(
        self, comparison: Comparison, machine: Machine
    ) -> None:
        for row in trained(comparison, self.asked):
            folder = machine.run_directory(row.record)
            for part in row.record.ranks:
                assert (noted := log.noted_memory(folder, part.rank)), row.label
                assert log.told_memory(row.record, part.rank) == noted, row.label
                assert part.reserved_bytes == log.largest_held_bytes(folder, part.rank), row.label

    def test_no_speed_is_told_of_a_device_on_which_no_kernel_runs(self, comparison: Comparison) -> None:
        assert all(row.run.tokens_per_second is None for row in comparison.rows)
        assert all(row.run.step_seconds == [] for row in comparison.rows)


class FewClean(Clean):
    nproc = 2

    @pytest.fixture
    def comparison(self, machine: Machine) -> Comparison:
        return machine.compare(self.few, self.nproc, settings(self.precision), log=True)


class TestFewBf16Mixed(FewClean):
    precision = "bf16-mixed"
    few = (*FEW, "fsdp-grad-op", *ON_CUDA_ALONE)


class TestFewFp16Mixed(FewClean):
    precision = "fp16-mixed"
    few = ("zero2", "fsdp")


class TestGroupsOfFourRanks(FewClean):
    precision = "fp32"
    parity = frozenset({"exact", "tight"})
    few = ("fsdp-hybrid", "fsdp1-hybrid", "fsdp-tp")
    nproc = 4


@EXHAUSTIVE
class TestBf16Mixed(Clean):
    precision = "bf16-mixed"


@EXHAUSTIVE
class TestFp32(Clean):
    precision = "fp32"
    parity = frozenset({"exact", "tight"})


@EXHAUSTIVE
class TestFp16Mixed(Clean):
    precision = "fp16-mixed"
