from harness.judge.comparison import Comparison
from harness.tell.sections.amounts import prediction_section
from tests.records import make_prediction, make_record


def test_each_prediction_has_its_error() -> None:
    """Of the largest of the measured peaks: 2,001,000 bytes on the second rank."""
    ddp = make_record(label="ddp", prediction=make_prediction(2_101_050))
    single = make_record(prediction=make_prediction(1_900_000))
    section = prediction_section(Comparison([single, ddp]))
    assert section is not None
    text, table = section.blocks
    assert table.texts() == [  # type: ignore[union-attr]
        ["single", "1", "1.90", "2.00", "-5.0 %", "optimizer step"],
        ["ddp", "2", "2.10", "2.00", "+5.0 %", "optimizer step"],
    ]
    assert "5 % on average and 5 % at most" in text.text  # type: ignore[union-attr]


def test_records_without_predictions_have_no_section() -> None:
    assert prediction_section(Comparison([make_record(), make_record(label="ddp")])) is None


def test_a_prediction_without_a_measurement_is_left_out() -> None:
    unmeasured = make_record(label="ddp", ranks=[], prediction=make_prediction(5))
    assert prediction_section(Comparison([make_record(), unmeasured])) is None
