"""The page computes what the command prints: in Python, and with the page's own script in node."""

import json
import shutil
import subprocess
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.plan.estimate.row import EstimateRow
from harness.plan.page.coefficients import page_data
from harness.plan.page.writer import page, write_page
from tests.harness.plan.estimate.asking import ask, rows
from tests.harness.plan.page.evaluated import evaluate

pytestmark = pytest.mark.long(seconds=15)
BACKENDS = "ddp zero2 zero3 fsdp fsdp-hybrid fsdp1"
POSITIONS = ((16, 1, 512), (16, 4, 256), (1, 16, 128))
SETTINGS = {
    "plain": (),
    "checkpointing": ("training.activation_checkpointing=true",),
    "accumulating": ("training.accumulation_steps=3",),
}
MIXED = ("training.precision=bf16-mixed", "data.sequence_length=512", "training.micro_batch_size=1")
ASKED: dict[str, Any] = {"backends": BACKENDS, "gpu": "A100-80", "fabric": "HDR200"}


@lru_cache
def exported(settings: str) -> dict[str, Any]:
    """As the page reads it."""
    asked = ask(*MIXED, *SETTINGS[settings], **ASKED, world_sizes=(1, 16))
    data: dict[str, Any] = json.loads(json.dumps(page_data(asked)))
    return data


def answers(settings: str, size: int, b: int, s: int) -> list[EstimateRow]:
    own = (f"data.sequence_length={s}", f"training.micro_batch_size={b}")
    return rows(*MIXED, *SETTINGS[settings], *own, **ASKED, world_sizes=(size,))


def assert_equal(found: dict[str, Any], row: EstimateRow) -> None:
    """Bytes exactly, seconds up to rounding."""
    assert found["label"] == row.label
    if row.unsupported is not None:
        assert found["unsupported"] == row.unsupported
        return
    assert row.memory is not None
    assert row.speed is not None
    assert (found["peak"], found["needed"]) == (row.memory.peak_bytes, row.memory.device_bytes)
    assert (found["sent"], found["between"]) == (row.sent_bytes, row.between_bytes)
    speed = row.speed
    for key, value in (
        ("computing", speed.computing_seconds), ("communication", speed.communication_seconds),
        ("exposed", speed.exposed_seconds), ("step", speed.step_seconds),
        ("tokens", speed.tokens_per_second_per_gpu), ("utilization", speed.model_flops_utilization),
        ("hours", row.hours_per_billion_tokens),
    ):  # fmt: skip
        assert found[key] == pytest.approx(value, rel=1e-9, abs=1e-12), key


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("size", "b", "s"), POSITIONS)
def test_coefficients_give_the_command_s_figures(settings: str, size: int, b: int, s: int) -> None:
    data = exported(settings)
    for row in answers(settings, size, b, s):
        assert_equal(evaluate(data, row.label, size, b, s), row)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node; the test above evaluates without it")
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_page_s_script_gives_the_command_s_figures(settings: str, tmp_path: Path) -> None:
    file = tmp_path / "data.json"
    file.write_text(json.dumps(exported(settings)))
    script = files("harness.plan.page").joinpath("page.js")
    program = (
        f"const {{evaluate}} = require({str(script)!r}); const data = require({str(file)!r});"
        f"console.log(JSON.stringify({json.dumps(POSITIONS)}.map(([n, b, s]) =>"
        " Object.keys(data.rows).map((label) => evaluate(data, label, n, b, s)))))"
    )
    done = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    for (size, b, s), found in zip(POSITIONS, json.loads(done.stdout), strict=True):
        for one, row in zip(found, answers(settings, size, b, s), strict=True):
            assert_equal(one, row)
            if row.verdict is not None:
                assert one["verdict"] == row.verdict.answer


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_sliders_and_boxes_change_what_a_reader_sees(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page(exported("plain")))
    program = Path(__file__).with_name("document.js")
    done = subprocess.run(["node", str(program), str(file)], capture_output=True, text=True, check=True)
    first, second, hidden = json.loads(done.stdout)
    assert first["at"] == ["16", "1", "512"]
    assert first["answer"].startswith("ddp, zero2, zero3, fsdp, fsdp-hybrid, fsdp1 fit; fastest: ")
    assert second["at"] == ["1", "1", "512"]
    of_ddp, alone = answers("plain", 1, 1, 512)[0], second["rows"][0]
    assert of_ddp.memory is not None
    assert alone[:2] == [" ddp", f"{of_ddp.memory.peak_bytes / 1e9:.1f}"]
    assert second["rows"][4][1].startswith("unsupported: hybrid sharding needs at least 2 replicas")
    assert first["charts"] == second["charts"] == hidden["charts"] == 3
    assert hidden["lines"] == second["lines"] - 3


def test_the_page_needs_no_other_file() -> None:
    text = page(exported("plain"))
    assert "<script src" not in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    begin = text.index('type="application/json">') + len('type="application/json">')
    assert json.loads(text[begin : text.index("</script>", begin)]) == exported("plain")


def test_a_name_cannot_end_the_script_element() -> None:
    text = page(exported("plain") | {"model": "</script><b>"})
    assert "</script><b>" not in text


def test_why_memory_is_missing_is_said(tmp_path: Path) -> None:
    write_page(ask(model="bert-base-cased", world_sizes=(2, 4)), tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "memory n/a: activations and speed of BertModel, which is no causal language model" in text


def test_another_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        HarnessError, match=r"--report was given .*page\.md'; give a name that ends with \.html"
    ):
        write_page(ask(), tmp_path / "page.md")


def test_nothing_to_draw_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="nothing can be drawn"):
        write_page(ask(backends="single", world_sizes=(2, 4)), tmp_path / "page.html")
