"""A report never claims a GPU where a CUDA stub stood in for one, nor a speed."""

from harness.forms.textbook import find_peak
from harness.judge.comparison import Comparison
from harness.judge.quantities import first_timed, rate
from harness.tell.first_page import rank_words, short_document
from harness.tell.report import details_document
from harness.tell.writers.markdown import render_markdown
from tests.harness.tell.cells import repeats
from tests.records import make_record, on_stub


def page() -> tuple[str, str]:
    comparison = Comparison(
        [on_stub(r) for r in (make_record(), *repeats("ddp", 0.5, 0.6), *repeats("fsdp", 0.7))]
    )
    details = details_document(comparison)
    short = short_document(comparison, "all", details)
    paths = {picture.key: picture.key for document in (short, details) for picture in document.pictures()}
    return tuple(render_markdown(document, paths, "", "report.details.md") for document in (short, details))


def test_the_device_is_a_stub_in_title_scope_and_machine() -> None:
    short, details = page()
    assert short.startswith("# model with 0.001 M parameters on 2 CUDA stub ranks")
    assert "2 CUDA stub ranks over nccl" in short
    assert "no kernel ran, so peaks and speeds: unknown" in short
    assert "cuda (CUDA stub), collectives over nccl" in details


def test_an_unsupported_backend_next_to_it_makes_no_gpu_of_it() -> None:
    unsupported = make_record(label="fsdp-hybrid", status="unsupported", ranks=[], steps=[])
    world = unsupported.world.model_copy(update={"device": "cuda", "collectives": "nccl"})
    unsupported = unsupported.model_copy(update={"world": world})
    comparison = Comparison([on_stub(make_record()), on_stub(make_record(label="ddp")), unsupported])
    assert rank_words(comparison) == "2 CUDA stub ranks"


def test_no_figure_of_speed_is_left() -> None:
    short, details = page()
    assert "no kernel runs on a CUDA stub" in short
    for text in (short, details):
        assert "2,048" not in text  # 1,024 tokens in 0.5 s
        assert "tokens/s)" not in text
    assert "fastest" not in short


def test_steps_of_a_stub_are_not_timed_and_those_of_others_are() -> None:
    record = make_record(label="ddp")
    assert first_timed(record) == 2
    assert rate(record, "tokens") == 2048
    assert first_timed(on_stub(record)) == 4
    assert rate(on_stub(record), "tokens") is None


def test_that_nothing_is_timed_is_no_finding_on_a_stub() -> None:
    runs = [on_stub(record) for record in (make_record(), make_record(label="ddp"))]
    assert "nothing-timed" not in {found.id for found in Comparison(runs).findings}


def test_a_stub_has_no_peak_whatever_name_it_was_given() -> None:
    assert find_peak("NVIDIA A100-SXM4-80GB", "bfloat16") is not None
    assert find_peak("CUDA stub NVIDIA A100-SXM4-80GB", "bfloat16") is None
