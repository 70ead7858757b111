from pathlib import Path

from harness.record import Record
from harness.record.record_files import ARCHIVE_NAME
from harness.record.store import read_runs
from harness.record.workload import known_strategy
from harness.tell.short.verdict import traffic_sentence
from tests.harness.tell.short.records import stage_of
from tests.records import make_communication, make_record

REPORTS = Path(__file__).resolve().parents[4] / "reports"


def traffic(*records: Record) -> str:
    return traffic_sentence(stage_of(*records))


def test_the_cells_that_send_least_and_most_are_named_with_their_ratio() -> None:
    text = traffic(
        make_record(),
        make_record(label="ddp", comm=make_communication(2, payload_bytes=4_000_000)),
        make_record(label="zero1", comm=make_communication(2, payload_bytes=6_000_000)),
        make_record(label="zero2", comm=make_communication(2, payload_bytes=6_000_000)),
    )
    assert text.startswith("Least traffic on 2 ranks: ddp sends 4.00 MB per rank and step (ring algorithm)")
    assert "; most: zero1 and zero2, 6.00 MB (1.5 x);" in text


def test_one_rank_sends_nothing_worth_a_sentence() -> None:
    assert traffic(make_record()) == ""


def test_what_was_not_counted_is_said() -> None:
    assert traffic(make_record(label="ddp", windows=None, comm=[])) == "Communication was not counted."


def test_what_a_transport_sends_that_emulates_a_collective_is_told() -> None:
    scattered = make_communication(2, op="reduce_scatter", payload_bytes=4_000_000)
    text = traffic(make_record(), make_record(label="ddp"), make_record(label="fsdp", comm=scattered))
    assert "; gloo implements reduce-scatter as all-reduce and sends up to 4.00 MB." in text
    assert "implements" not in traffic(make_record(), make_record(label="ddp"))


def test_a_byte_too_many_is_not_as_expected() -> None:
    """On published runs of two ranks, where a ring sends what is paid in: 16 bytes more in every step."""
    records = [record for _, record in read_runs([REPORTS / "default" / ARCHIVE_NAME])[0]]
    alone, ddp = (next(r for r in records if r.backend.label == label) for label in ("single", "ddp"))
    assert "; as expected to the byte." in traffic(alone, ddp)
    probed = ddp.windows.probed if ddp.windows else 0
    comm = [
        row.model_copy(update={"payload_bytes": row.payload_bytes + 16 * probed * (row.phase == "backward")})
        for row in ddp.comm
    ]
    text = traffic(alone, ddp.model_copy(update={"comm": comm}))
    assert "; not what the closed form expects: ddp (+16 bytes)." in text


def test_norms_of_what_claims_a_strategy_are_set_aside() -> None:
    records = [record for _, record in read_runs([REPORTS / "default" / ARCHIVE_NAME])[0]]
    (ddp,) = (record for record in records if record.backend.label == "ddp" and record.repeat == 0)
    claim = known_strategy(ddp)
    backend = ddp.backend.model_copy(update={"name": "observed-ddp", "label": "observed-ddp", "claim": claim})
    comm = [
        row.model_copy(update={"payload_bytes": row.payload_bytes + 16 * (row.phase == "backward")})
        for row in ddp.comm
    ]
    text = traffic(ddp.model_copy(update={"backend": backend, "comm": comm}))
    assert "; as expected but for norms and flags: observed-ddp (+" in text
    assert "not what the closed form expects" not in text


def test_cells_without_a_closed_form_are_named_and_not_as_expected() -> None:
    text = traffic(make_record(label="ddp"))
    assert "as expected" not in text
    assert "; no closed form for ddp." in text
