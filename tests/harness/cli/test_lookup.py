"""`harness settings`, `explain` and `backends`, the files that are shipped, and what a shell offers."""

import json
import re
from contextlib import chdir
from pathlib import Path

import pytest
from click.testing import CliRunner

from harness import cli
from harness.cli.lookup import glossary, unknown, word_of
from harness.errors import HarnessError
from harness.job.config import load_experiment
from harness.job.experiment import INHERITS, Experiment
from harness.judge.wording import entries
from harness.shipped import names, resolve
from harness.slurm.matrix import load_site
from harness.tell.formats import WIDTH
from tests.docs.markdown import ROOT
from tests.plugins import register
from tests.representatives import first

from .command_line import harness, harness_process, refused, succeeds


def test_settings_of_a_section_fit_the_width(tmp_path: Path) -> None:
    lines = harness("settings", "training", cwd=tmp_path).stdout.splitlines()
    assert lines[0].startswith("training: Batch, length")
    assert "  training.precision: fp32 | bf16-mixed | fp16-mixed | bf16 | fp8, default fp32" in lines
    assert max(map(len, lines)) <= WIDTH
    assert not any("optimizer." in line for line in lines)


def test_one_setting_and_a_mistyped_one(tmp_path: Path) -> None:
    assert len(harness("settings", "training.steps", cwd=tmp_path).stdout.splitlines()) == 3
    assert "Did you mean 'steps'?" in refused(tmp_path, "settings", "training.step")
    assert "Did you mean 'optimizer.learning_rate'?" in refused(tmp_path, "settings", "training.lr")
    assert "Did you mean 'training'?" in refused(tmp_path, "settings", "trainig")


def test_settings_json_names_every_setting(tmp_path: Path) -> None:
    document = json.loads(harness("settings", "--json", cwd=tmp_path).stdout)
    found = {setting["name"] for setting in document["settings"]}
    sections = dict(Experiment())
    keys = {f"{name}.{key}" for name, s in sections.items() if name != "task" for key in type(s).model_fields}
    assert found == {"task", *keys}


def test_schema_takes_what_a_file_takes_and_no_unknown_key(tmp_path: Path) -> None:
    schema = json.loads(harness("settings", "--schema", cwd=tmp_path).stdout)
    assert set(schema["properties"]) == {*Experiment.model_fields, INHERITS}
    assert schema["additionalProperties"] is False
    limit = schema["$defs"]["RuntimeSection"]["properties"]["memory_limit"]
    assert {"type": "string"} in limit["anyOf"][0].get("anyOf", limit["anyOf"])


def test_the_written_file_is_the_default_job(tmp_path: Path) -> None:
    succeeds("settings", "--write", "job.yaml", cwd=tmp_path)
    assert load_experiment(tmp_path / "job.yaml") == Experiment()
    assert "'job.yaml' exists" in refused(tmp_path, "settings", "--write", "job.yaml")


def test_every_setting_of_the_written_file_can_be_taken_in(tmp_path: Path) -> None:
    harness("settings", "--write", "mine.yaml", "--schema", cwd=tmp_path)
    text = (tmp_path / "mine.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=mine.schema.json\n")
    assert json.loads((tmp_path / "mine.schema.json").read_text())["title"] == "Experiment"
    taken = re.sub(r"^  #(?! )", "  ", text, flags=re.MULTILINE)
    assert taken.count("\n  ") > 60
    (tmp_path / "mine.yaml").write_text(taken)
    read = load_experiment(tmp_path / "mine.yaml")
    assert read == Experiment()
    assert read.training.model_fields_set == set(type(read.training).model_fields)


def test_explain_has_cause_and_fix_and_hints_at_what_an_unknown_word_may_mean(tmp_path: Path) -> None:
    shown = harness("explain", "gradient-scale", cwd=tmp_path).stdout
    assert shown.startswith("gradient-scale: Gradients are scaled by a constant factor.\n  Cause: ")
    assert "\n  Fix: " in shown
    assert "Reported:" not in shown  # no threshold decides
    assert "\n  Reported: if the same rank" in harness("explain", "slow-rank", cwd=tmp_path).stdout
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert "Did you mean 'gradient-scale'" in refused(tmp_path, "explain", "gradient-scal")
    every = [line.split()[0] for line in harness("explain", cwd=tmp_path).stdout.splitlines()]
    assert every == [*entries()]
    for given, meant in (("clipping", "clipping-differs"), ("payloads", "payload"), ("xyzzy", "")):
        hint = f" Did you mean '{meant}'?" * bool(meant)
        listed = f"`harness explain` lists all {len(every)} findings"
        assert unknown(given, entries()) == f"'{given}' is unknown.{hint} {listed}"


def test_explain_has_the_words_of_the_glossary(tmp_path: Path) -> None:
    assert harness("explain", "Not-Comparable", cwd=tmp_path).stdout.startswith("not comparable: the run ")
    shown = json.loads(harness("explain", "payload", "--json", cwd=tmp_path).stdout)
    assert shown == {"word": "payload", "meaning": glossary()["payload"]}
    for column in ("peak_bytes", "peak MB/rank"):
        assert "served on a rank" in harness("explain", column, cwd=tmp_path).stdout
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")][2:]
    assert len(set(glossary().values())) == len(rows)
    assert all("](" not in meaning and meaning for meaning in glossary().values())
    for verdict in ("exact", "tight", "band", "diverged", "unjudged"):
        assert word_of(verdict) == verdict


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in ("configs", "sites") for name in names(kind)]
)
def test_shipped_files_are_read(kind: str, name: str) -> None:
    read = {"configs": load_experiment, "sites": load_site}[kind]
    assert read(resolve(Path(name), kind))


def test_shipped_files_are_found_by_name_and_others_by_path(tmp_path: Path) -> None:
    assert "@default" in names("configs")
    assert "@ibex" in names("sites")
    assert resolve(Path("job.yaml"), "configs") == Path("job.yaml")
    with pytest.raises(HarnessError, match=r"'@defaults' is not shipped. Did you mean '@default'\\?"):
        resolve(Path("@defaults"), "configs")
    done = harness("compare", "--config", "@defaults", cwd=tmp_path)
    assert done.returncode == 2
    assert "Did you mean '@default'?" in done.stderr


@pytest.mark.parametrize("target", first(["json:dumps"], ["no_such_module:Mine", "json:dumps"]))
def test_a_broken_third_party_does_not_hide_the_others(tmp_path: Path, target: str) -> None:
    register(tmp_path, {"broken": target})
    done = harness_process("backends", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "zero3" in done.stdout
    assert "broken" in done.stdout + done.stderr


def test_backends_and_what_is_not_run_are_listed_as_one_document(tmp_path: Path) -> None:
    document = json.loads(harness("backends", "--json", cwd=tmp_path).stdout)
    listed = {backend["name"]: backend for backend in document["backends"]}
    assert {"single", "ddp", "zero3", "fsdp"} <= set(listed)
    assert "offload" in listed["zero3"]["options"]
    reasons = {feature["name"]: feature["reason"] for feature in document["not_run"]}
    assert "scrambles the model" in reasons["ZenFlow"]
    assert "removed from DeepSpeed" in reasons["MiCS"]
    shown = harness("backends", cwd=tmp_path).stdout
    assert "MiCS removed from DeepSpeed" in " ".join(shown.split())


def asked(line: str) -> dict[str, str]:
    """What bash sets to ask for words in place of the last one of a line, which may be unfinished."""
    return {
        "_HARNESS_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")),
    }  # fmt: skip


def words_of(printed: str) -> list[str]:
    return [text.partition(",")[2] for text in printed.splitlines()]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("harness com", ["compare"]),
        ("harness run --back", ["--backend"]),
        ("harness report --format m", ["md"]),
    ],
)  # fmt: skip
def test_the_shell_offers_what_the_harness_knows(tmp_path: Path, line: str, words: list[str]) -> None:
    with chdir(tmp_path):
        done = CliRunner().invoke(cli.harness, [], prog_name="harness", env=asked(line))
    assert words_of(done.stdout) == words
