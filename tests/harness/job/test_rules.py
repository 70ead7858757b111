"""What settings may hold, and which exclude each other."""

import pytest

from harness.job.config import load_experiment
from tests.harness.job.refusals import refused


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["training.steps=3", "training.epochs=1"], "give either `steps` or `epochs`, not both"),
        (["model.name=gpt2", "model.config={n_layer: 1}"], "give either `name` or `config`, not both"),
        (["model.weights=pretrained"], "need a `name`"),
        (["data.source=text"], "source 'text' needs a `path`"),
        (["data.path=notes.txt"], "would be ignored with source 'prose'"),
        (["data.prompt_field=question"], "`prompt_field` needs source jsonl, json, csv, datasets"),
        (["data.source=squad", "data.path=a.json", "data.packed=true"], "leave `packed` out"),
        (["data.sequence_length=1"], "must be at least 2"),
        (["training.initial_loss_scale=3"], "must be a power of two"),
    ],
)
def test_contradictions_are_refused(assignments: list[str], message: str) -> None:
    assert message in refused(*assignments)


@pytest.mark.parametrize(
    ("assignment", "place"),
    [
        ("training.steps=0", "'training.steps' was given 0"),
        ("training.steps=many", "'training.steps' was given 'many'"),
        ("training.precision=fp4", "'training.precision' was given 'fp4'"),
        ("schedule.final_fraction=2", "'schedule.final_fraction' was given 2"),
        ("compare.backends=[]", "'compare.backends' was given []"),
    ],
)
def test_bad_value_is_named_with_its_place(assignment: str, place: str) -> None:
    message = refused(assignment)
    assert place in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["measure.checkpoint=true", "measure.probed_steps=0"], "`checkpoint` needs `probed_steps`"),
        (["measure.checkpoint=true", "measure.timed=false"], "needs `measure.timed: true`"),
        (["measure.checkpoint=true", "training.steps=4"], "is saved after 5 steps"),
        (["measure.keep_checkpoint=true"], "`keep_checkpoint` needs `checkpoint` to be native"),
        (["measure.trace=true", "measure.traced_steps=0"], "`trace` needs `traced_steps`"),
    ],
)
def test_a_measurement_that_could_not_be_made_is_refused(settings: list[str], message: str) -> None:
    assert message in refused(*settings)


def test_a_limit_that_nothing_would_count_is_refused() -> None:
    message = refused("runtime.memory_limit=2GB", "measure.probed_steps=0")
    assert "needs `measure.probed_steps` of at least 1" in message


def test_torch_chooses_the_implementation_of_the_optimizer_unless_the_job_does() -> None:
    assert load_experiment(None).optimizer.implementation == "default"
    for name in ("for-loop", "foreach", "fused"):
        experiment = load_experiment(None, [f"optimizer.implementation={name}"])
        assert experiment.optimizer.implementation == name


def test_an_unknown_implementation_of_the_optimizer_is_refused() -> None:
    message = refused("optimizer.implementation=fuse")
    assert "optimizer.implementation" in message
    assert "'for-loop', 'foreach' or 'fused'" in message


def test_a_word_close_to_an_allowed_one_is_suggested() -> None:
    message = refused("adapter.kind=lorra")
    assert message.endswith("'lorra': Input should be 'none' or 'lora'. Did you mean 'lora'?")
