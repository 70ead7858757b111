"""Names of settings: what is unknown is refused with what was probably meant."""

from pathlib import Path

import pytest

from harness.job.config import load_experiment, other_tools
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


QLORA = "adapter.kind=lora, adapter.base_dtype=nf4"
ADAM = "Did you mean 'optimizer.kind=adamw-8bit' or 'optimizer.kind=adamw-8bit-bnb'?"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("qlora=true", f"Did you mean '{QLORA}'?"),
        ("adapter.kind=qlora", f"Did you mean '{QLORA}'?"),
        ("optimizer.kind=adam8", ADAM),
        ("optimizer.name=adamw_8bit", ADAM),
        ("optimizer.name=AdamW", "Did you mean 'optimizer.kind=adamw'?"),
        ("optimizer.name=mine", "'optimizer.name' is unknown. Allowed in optimizer: kind, "),
        ("training.dtype=bf16", "Did you mean 'training.precision=bf16-mixed' or 'training.precision=bf16'?"),
        ("training.loss=chunked", "Did you mean 'loss.chunk_tokens'?"),
        ("training.bf16=true", "Did you mean 'training.precision=bf16-mixed' or 'training.precision=bf16'?"),
        (
            "training.precision=amp",
            "Did you mean 'training.precision=bf16-mixed' or 'training.precision=fp16",
        ),
        (
            "model.attention=flash",
            "Did you mean 'model.attention=sdpa' or 'model.attention=flash_attention_2'",
        ),
        ("training.grad-checkpoint=true", "Did you mean 'training.activation_checkpointing'?"),
        ("training.seq_len=8", "Did you mean 'data.sequence_length'?"),
        ("deepspeed=zero3", "Did you mean 'compare.backends'?"),
    ],
)
def test_word_that_people_type_is_refused_with_what_it_stands_for(given: str, said: str) -> None:
    assert said in refused(given)


@pytest.mark.parametrize(
    ("typed", "kind"),
    [
        ("adamw_8bit", "adamw-8bit"), ("AdamW8bit", "adamw-8bit"), ("adamw_torch_8bit", "adamw-8bit"),
        ("adamw_bnb_8bit", "adamw-8bit-bnb"), ("adamw_torch", "adamw"), ("sgd", "sgd"),
    ],
)  # fmt: skip
def test_an_optimizer_by_the_name_that_other_tools_give_it(typed: str, kind: str) -> None:
    assert load_experiment(None, (f"optimizer.kind={typed}",)).optimizer.kind == kind


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("optimizer.kind=adafactor", "Adafactor is not among the optimizers; give one of your own with"),
        ("optimizer.kind=lion_8bit", "Lion is not among"),
        ("optimizer.kind=paged_adamw_8bit", "adamw-8bit-bnb is bitsandbytes' without pages"),
        ("offload=cpu", "Did you mean 'compare.backends=[zero3:offload=cpu]' or"),
        ("data.sequence_length=32k", "was given '32k': write 32768, or 32000 if that is meant"),
        ("loss.chunk_tokens=1K", "write 1024, or 1000"),
    ],
)
def test_what_is_not_offered_says_what_is(given: str, said: str) -> None:
    assert said in refused(given)


def test_names_of_other_tools_stand_for_settings_that_exist() -> None:
    experiment = load_experiment(None, ())
    sections = {name: set(getattr(type(section), "model_fields", ())) for name, section in experiment}
    for meant in other_tools().values():
        for settings in meant:
            for setting in settings.split(", "):
                name, value = setting.partition("=")[::2]
                section, key = name.split(".")
                assert key in sections[section], setting
                if value:
                    load_experiment(None, tuple(settings.split(", ")))
