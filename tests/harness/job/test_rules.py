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
        (["training.steps=0"], "'training.steps' was given 0"),
        (["training.steps=many"], "'training.steps' was given 'many'"),
        (["training.precision=fp4"], "'training.precision' was given 'fp4'"),
        (["schedule.final_fraction=2"], "'schedule.final_fraction' was given 2"),
        (["compare.backends=[]"], "'compare.backends' was given []"),
        (["measure.checkpoint=true", "measure.probed_steps=0"], "`checkpoint` needs `probed_steps`"),
        (["measure.checkpoint=true", "measure.timed=false"], "needs `measure.timed: true`"),
        (["measure.checkpoint=true", "training.steps=4"], "is saved after 5 steps"),
        (["measure.keep_checkpoint=true"], "`keep_checkpoint` needs `checkpoint` to be native"),
        (["measure.trace=true", "measure.traced_steps=0"], "`trace` needs `traced_steps`"),
        (
            ["runtime.memory_limit=2GB", "measure.probed_steps=0"],
            "needs `measure.probed_steps` of at least 1",
        ),
        (["optimizer.implementation=fuse"], "'optimizer.implementation' was given 'fuse'"),
        (["optimizer.implementation=fuse"], "'for-loop', 'foreach' or 'fused'"),
        (["adapter.kind=lorra"], "'lorra': Input should be 'none' or 'lora'. Did you mean 'lora'?"),
    ],
)
def test_what_settings_cannot_be_alone_or_together_is_refused(assignments: list[str], message: str) -> None:
    found = refused(*assignments)
    assert message in found
    assert "\n" not in found


def test_torch_chooses_the_implementation_of_the_optimizer_unless_the_job_does() -> None:
    assert load_experiment(None).optimizer.implementation == "default"
    for name in ("for-loop", "foreach", "fused"):
        experiment = load_experiment(None, [f"optimizer.implementation={name}"])
        assert experiment.optimizer.implementation == name
