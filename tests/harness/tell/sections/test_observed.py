from harness.judge.comparison import Comparison
from harness.record import ObservationPart, Record
from harness.tell.document import Paragraph, Table
from harness.tell.outline import details_document
from harness.tell.sections.job import observed_section
from tests.records import make_record


def script(label: str, **unknown: str) -> Record:
    part = ObservationPart(
        command=["torchrun", "my train.py"], frameworks=["lightning"], base="ddp",
        loss="what Lightning's training_step was given", unknown={"eval": "not read"} | unknown,
        notes=["2 of 9 steps had a batch of another size"],
    )  # fmt: skip
    return make_record(label=label).model_copy(update={"observation": part})


def test_a_report_without_scripts_has_no_such_section() -> None:
    assert observed_section(Comparison([make_record()])) is None


def test_what_every_script_lacks_stands_in_one_line() -> None:
    rows = [script("observed-ddp"), script("observed-fsdp", loss="divided or not")]
    section = observed_section(Comparison(rows))
    assert section is not None
    (table,) = [block for block in section.blocks if isinstance(block, Table)]
    assert table.texts() == [["all", "eval", "not read"], ["observed-fsdp", "loss", "divided or not"]]


def test_command_framework_loss_and_notes_are_shown() -> None:
    document = details_document(Comparison([script("observed-ddp")]))
    (section,) = [section for section in document.sections if section.key == "observed"]
    text = [str(block.text) for block in section.blocks if isinstance(block, Paragraph)][1]
    assert text == (
        "observed-ddp: `torchrun 'my train.py'`. Driven by lightning. Backend of the same strategy: ddp. "
        "Loss: what Lightning's training_step was given. 2 of 9 steps had a batch of another size."
    )
