"""Names of settings: what is unknown is refused with what was probably meant."""

from pathlib import Path

import pytest

from harness.job.config import other_tools
from harness.job.experiment import Experiment
from tests.harness.job.refusals import refused, refused_file


def test_unknown_section_is_refused_with_suggestion() -> None:
    message = refused("trainig.steps=3")
    assert "'trainig' is unknown" in message
    assert "Did you mean 'training'?" in message


def test_unknown_key_of_a_section_is_refused_with_suggestion() -> None:
    message = refused("training.step=3")
    assert "'training.step' is unknown" in message
    assert "Did you mean 'steps'?" in message
    assert "global_batch_size" in message


@pytest.mark.parametrize(
    "section",
    ["model", "data", "optimizer", "schedule", "training", "evaluation", "measure", "runtime", "compare"],
)
def test_every_section_refuses_unknown_keys(section: str) -> None:
    message = refused(f"{section}.no_such_key=1")
    assert f"'{section}.no_such_key' is unknown. Allowed in {section}:" in message


def test_unknown_key_in_a_file_is_refused_with_suggestion(tmp_path: Path) -> None:
    message = refused_file(tmp_path, "optimizer:\n  learning_rates: 0.1\n")
    assert "'optimizer.learning_rates' is unknown" in message
    assert "Did you mean 'learning_rate'?" in message


def test_setting_outside_of_its_section_is_refused_with_its_place() -> None:
    assert "'precision' is unknown" in refused("precision=bf16")
    assert "Did you mean 'training.precision'?" in refused("precision=bf16")
    assert "Did you mean 'optimizer.learning_rate'?" in refused("training.learning_rate=1")
    assert "Did you mean 'training.steps'?" in refused("steps=3")
    both = "Did you mean 'schedule.warmup_steps' or 'measure.warmup_steps'?"
    assert f"is unknown. {both} Allowed: " in refused("warmup_steps=3")


def test_name_of_another_tool_is_refused_with_ours() -> None:
    message = refused("training.gradient_accumulation_steps=4")
    assert "Did you mean 'training.accumulation_steps'?" in message
    assert "Did you mean 'training.gradient_clipping'?" in refused("training.max-grad-norm=1")


def test_names_of_other_tools_stand_for_settings_that_exist() -> None:
    sections = {name: set(getattr(type(section), "model_fields", ())) for name, section in Experiment()}
    for meant in other_tools().values():
        for setting in meant:
            section, key = setting.split(".")
            assert key in sections[section], setting
