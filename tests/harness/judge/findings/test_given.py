from typing import Any

from harness.judge.findings.finding import Finding
from harness.record import GivenMode, GivenPart, GivenSettingPart, Record
from tests.harness.judge.findings.told import told
from tests.records import make_record


def row(label: str, mode: GivenMode, **changes: Any) -> Record:
    settings = [
        GivenSettingPart(key="gradient_clipping", given=0.5, handling="taken", used=0.5),
        GivenSettingPart(key="fp16.hysteresis", given=2, handling="pinned", used=1, reason="why"),
        GivenSettingPart(key="steps_per_print", given=9, handling="pinned", reason="prints only"),
    ]
    part = GivenPart(file="ds.json", kind="deepspeed", mode=mode, sha256="0" * 64, settings=settings)
    record = make_record(label=label, **changes)
    return record.model_copy(update={"backend": record.backend.model_copy(update={"given": part})})


def findings(*records: Record) -> list[Finding]:
    return told(records, "exactly-as-given")


def test_a_row_exactly_as_given_names_what_makes_it_unfair() -> None:
    clipped = {"training": {"gradient_clipping": 0.5}, "job_id": "a" * 12}
    (found,) = findings(
        make_record(), make_record(label="ddp"), make_record(**clipped),
        row("zero2:preset=library-defaults,row=ds-as-given", "exactly-as-given", **clipped),
    )  # fmt: skip
    assert found.values["settings"] == {
        "training.gradient_clipping": [0.5, 1.0],
        "preset": ["library-defaults", "like-for-like"],
    }
    assert "training.gradient_clipping 0.5 against 1.0" in found.message
    assert found.message.endswith("Not as given: fp16.hysteresis")


def test_a_row_like_for_like_is_no_finding() -> None:
    assert findings(make_record(), make_record(label="ddp"), row("zero2:row=ds", "like-for-like")) == []
