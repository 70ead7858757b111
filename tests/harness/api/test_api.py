"""`import harness`: what programs call, and that it costs nothing until they do."""

import subprocess
import sys
from pathlib import Path

import pytest

import harness
from harness.api import Results, answer, assignments, several_jobs
from tests.docs.markdown import ROOT
from tests.harness.cli.command_line import harness as command
from tests.records import make_record, make_steps, make_weights

PUBLISHED = ROOT / "reports" / "default"
HEAVY = ("torch", "transformers", "pandas", "pydantic", "click", "deepspeed")


def test_import_loads_nothing_heavy() -> None:
    script = f"import sys, harness; harness.__version__; print(sorted({{*{HEAVY}}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_is_the_installed_one(tmp_path: Path) -> None:
    assert harness.__version__ in command("--version", cwd=tmp_path).stdout


def test_compare_is_a_function() -> None:
    with pytest.raises(harness.HarnessError, match="backend 'zero4' is unknown"):
        harness.compare(backends=["zero4"], quiet=True)


def test_compare_adds_rounds_as_its_command_does() -> None:
    with pytest.raises(harness.HarnessError, match="--within was given '300%'"):
        harness.compare(within=3, max_minutes=0.5, quiet=True)
    with pytest.raises(TypeError, match=r"no precision: give within=0\.03"):
        harness.compare(precision=0.03)  # type: ignore[arg-type]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'comparison_of'"):
        harness.comparison_of  # noqa: B018


def test_settings_are_typed_as_the_command_line_reads_them() -> None:
    words = assignments(
        {"training.precision": "bf16", "optimizer.learning_rate": 1e-5, "data.path": Path("a")}
    )
    assert words[1::2] == ['training.precision="bf16"', "optimizer.learning_rate=1e-05", 'data.path="a"']


def test_published_runs_are_the_rows_of_the_comparison() -> None:
    results = harness.load(PUBLISHED)
    frame = results.to_frame()
    assert list(frame.run_id) == [row.record.run_id for row in results.comparison.rows]
    fsdp = frame[frame.backend == "fsdp"]
    assert set(fsdp.model_state_bytes) == set(fsdp.expected_model_state_bytes)
    steps = results.to_frame("steps")
    assert len(steps) == sum(len(row.record.steps) for row in results.comparison.rows)
    assert set(steps.run_id) == set(frame.run_id)
    assert list(results.to_frame("findings").id) == [found.id for found in results.findings]


def test_a_frame_says_which_runs_are_not_the_same_job() -> None:
    other = make_record(label="ddp", initial_weights=make_weights("d" * 64))
    results = Results([(Path(record.run_id), record) for record in (make_record(), other)])
    assert list(results.to_frame().same_job) == [True, False]


def test_a_table_that_does_not_exist_is_refused() -> None:
    with pytest.raises(harness.HarnessError, match=r"table 'epochs' is unknown. Available: runs, steps"):
        harness.load(PUBLISHED).to_frame("epochs")  # type: ignore[arg-type]


def test_a_picture_of_the_report_is_an_svg_that_a_notebook_shows() -> None:
    results = harness.load(PUBLISHED)
    picture = results.plot("loss")
    assert picture._repr_svg_() == picture
    assert picture.startswith("<svg")
    with pytest.raises(
        harness.HarnessError, match=r"picture .los.: these runs have none\. Did you mean .loss."
    ):
        results.plot("los")


def test_a_notebook_shows_the_table_and_escapes_findings() -> None:
    results = harness.load(ROOT / "reports" / "traps" / "2-ranks-tied")
    text = results._repr_markdown_()
    assert text.startswith("| backend |")
    assert text.count("\n- finding ") > 0
    named = make_record(label="<img>", steps=make_steps([9.0, 9.0, 9.0, 9.0], [2.0, 1.5, 1.25, 1.0]))
    text = Results([(Path("a"), make_record(label="single")), (Path("b"), named)])._repr_markdown_()
    assert "diverged" in text
    assert "&lt;img&gt;" in text
    assert "<img>" not in text


def test_estimate_has_the_rows_of_the_command() -> None:
    settings = {"training.precision": "bf16-mixed"}
    estimate = harness.estimate("llama-3.1-8b", world_size=[8, 16], backends=["zero3"], settings=settings)
    assert estimate.to_frame().to_dict("records") == estimate.as_json()["rows"]
    words = ["estimate", "--model", "llama-3.1-8b", "--world-size", "8,16", "--backends", "zero3", "--json"]
    assert answer([*words, *assignments(settings)], quiet=True) == estimate.as_json()


@pytest.mark.parametrize("text", ['harness.load("reports/default")', 'harness.estimate("llama-3.1-8b"'])
def test_the_documented_lines_run(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8").split("```python\n")[1:]
    (block,) = (found.partition("```")[0] for found in blocks if text in found)
    monkeypatch.chdir(ROOT)
    exec(block, {"harness": harness})


def test_records_of_several_jobs_are_named_in_one_line() -> None:
    first, second = make_record(), make_record(label="ddp").model_copy(update={"job_id": "f" * 12})
    assert several_jobs([first, first]) is None
    line = several_jobs([first, first, second])
    assert line is not None
    assert "of 2 jobs" in line
    assert f"{first.job_id} (2 of {first.backend.label}); ffffffffffff (1 of ddp)" in line
    assert "\n" not in line
