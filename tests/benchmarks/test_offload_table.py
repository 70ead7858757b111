from benchmarks.offload_table import PAGE, page_with_table, records
from harness.judge.comparison import Comparison
from harness.judge.quantities import rank_states

RAN = records()
HELD = ("weights", "gathered", "gradients", "masters", "optimizer", "communication")


def test_the_page_has_the_table_of_its_records() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with_table(page, RAN) == page


def test_memory_of_every_rank_is_the_closed_form_to_the_byte() -> None:
    for label, record in RAN.items():
        for states in rank_states(record):
            assert states.expected is not None, label
            expected = states.expected.kinds()
            for kind in HELD:
                assert states.measured.get(kind, 0) == expected.get(kind, 0), (label, kind)


def test_every_row_trains_within_the_references_band() -> None:
    parities = {row.label: row.judgement.parity for row in Comparison(list(RAN.values())).rows}
    ran = {label for label, record in RAN.items() if record.status == "ok"}
    assert {parities[label] for label in ran} <= {"exact", "tight", "band"}


def test_deepspeeds_adam_is_another_optimizer() -> None:
    for stage, where in (("zero2", "optimizer"), ("zero3", "cpu")):
        torchs, deepspeeds = RAN[f"{stage}:offload={where}"], RAN[f"{stage}:adam=deepspeed,offload={where}"]
        assert torchs.backend.effective is not None
        assert deepspeeds.backend.effective is not None
        assert torchs.backend.effective.optimizer != deepspeeds.backend.effective.optimizer
