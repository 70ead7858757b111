"""The picture of an estimate: what is drawn, and over which numbers of ranks."""

from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.plan import document
from harness.plan.answer import estimate
from harness.plan.document import (
    curves_of,
    estimate_picture,
    sizes_to_draw,
    write_picture,
)
from harness.tell.pictures.drawing import draw, plot_format
from tests.harness.plan.asking import ask

MIXED = "training.precision=bf16-mixed"


def test_one_number_of_ranks_is_drawn_over_powers_of_two_that_fill_nodes() -> None:
    assert sizes_to_draw(ask(world_sizes=(48,), per_node=4)).world_sizes == (1, 2, 4, 8, 16, 32, 48)
    assert sizes_to_draw(ask(world_sizes=(2, 8))).world_sizes == (2, 8)


def test_strategies_with_equal_figures_share_a_curve() -> None:
    asked = ask(MIXED, backends="ddp accelerate-ddp fsdp", world_sizes=(2, 4), gpu="A100-80")
    curves = curves_of(estimate(asked))
    assert [curve.name for curve in curves] == ["ddp, accelerate-ddp", "fsdp"]
    assert [row.world_size for row in curves[0].rows] == [2, 4]


def test_every_strategy_and_the_limit_are_named() -> None:
    asked = ask(MIXED, backends="fsdp ddp", world_sizes=(2, 4), gpu="A100-80")
    svg = draw(estimate_picture(asked, estimate(asked))).decode()
    for text in ("fsdp", "ddp", "A100-80: 85.1 GB", "tokens/s per GPU", "exposed communication"):
        assert text in svg


def test_without_a_gpu_only_memory_is_drawn(tmp_path: Path) -> None:
    asked = ask(MIXED, world_sizes=(2, 4))
    write_picture(estimate(asked), [asked], tmp_path / "picture.svg")
    svg = (tmp_path / "picture.svg").read_text()
    assert "GB of memory per rank" in svg
    assert "tokens/s" not in svg


def test_another_format_is_refused() -> None:
    with pytest.raises(
        HarnessError, match=r"--plot was given 'a\.pdf'; give a name that ends with \.svg or \.png"
    ):
        plot_format(Path("a.pdf"))


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    asked = ask(MIXED, world_sizes=(2, 4))
    with pytest.raises(HarnessError, match="cannot be written"):
        write_picture(estimate(asked), [asked], tmp_path / "none" / "picture.svg")


def test_rows_that_were_estimated_are_drawn_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ask(MIXED, world_sizes=(2, 4))
    rows = estimate(asked)
    monkeypatch.setattr(document, "estimate", lambda _: pytest.fail("estimated a second time"))
    write_picture(rows, [asked], tmp_path / "picture.svg")
