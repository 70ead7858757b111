from benchmarks.offload_table import PAGE, buffers_on_host, largest_difference, page_with_table, records
from harness.judge.comparison import Comparison
from harness.judge.quantities.model_states import rank_states

RAN = records()
HELD = ("weights", "gathered", "gradients", "masters", "optimizer", "communication")


def test_the_page_has_the_table_of_its_records() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with_table(page, RAN) == page


def test_memory_and_files_of_every_rank_are_the_closed_form_to_the_byte() -> None:
    for label, record in RAN.items():
        for states in rank_states(record):
            assert states.expected is not None, label
            expected = states.expected.kinds()
            for kind in HELD:
                assert states.measured.get(kind, 0) == expected.get(kind, 0), (label, kind)
            assert (states.file_bytes or 0) == states.expected.file_bytes, label


def test_what_lies_in_files_follows_from_the_size_of_sub_groups() -> None:
    whole, cut = RAN["zero3:offload=nvme"], RAN["zero3:offload=nvme,sub_group_size=300000"]
    for record in (whole, cut):
        assert all(states.file_bytes for states in rank_states(record))
    assert buffers_on_host(cut) < buffers_on_host(whole) / 3


def test_large_weights_lie_in_files_too() -> None:
    states, both = (RAN[f"zero3:offload={where},sub_group_size=300000"] for where in ("nvme", "nvme-all"))
    for optimizer, weights in zip(rank_states(states), rank_states(both), strict=True):
        assert weights.measured["weights"] < optimizer.measured["weights"] / 3
        assert weights.file_bytes is not None
        assert optimizer.file_bytes is not None
        moved = weights.file_bytes - optimizer.file_bytes
        assert moved == optimizer.measured["weights"] - weights.measured["weights"]


def test_every_row_trains_within_the_references_band() -> None:
    parities = {row.label: row.judgement.parity for row in Comparison(list(RAN.values())).rows}
    ran = {label for label, record in RAN.items() if record.status == "ok"}
    assert {parities[label] for label in ran} <= {"exact", "tight", "band"}


def test_what_lies_in_files_trains_as_what_lies_in_host_memory_does() -> None:
    """With the same sub-groups, by which the norm is added up."""
    on_host = RAN["zero3:offload=optimizer"]
    for label in ("zero3:offload=cpu", "zero3:offload=nvme", "zero3:offload=nvme-all"):
        assert largest_difference(on_host, RAN[label]) == 0.0, label
    states, both = (RAN[f"zero3:offload={where},sub_group_size=300000"] for where in ("nvme", "nvme-all"))
    assert largest_difference(states, both) == 0.0


def test_deepspeeds_adam_is_another_optimizer() -> None:
    for stage, where in (("zero2", "optimizer"), ("zero3", "cpu")):
        torchs, deepspeeds = RAN[f"{stage}:offload={where}"], RAN[f"{stage}:adam=deepspeed,offload={where}"]
        assert torchs.backend.effective is not None
        assert deepspeeds.backend.effective is not None
        assert torchs.backend.effective.optimizer != deepspeeds.backend.effective.optimizer
