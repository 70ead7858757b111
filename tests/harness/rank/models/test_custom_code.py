"""Code that a model's folder brings runs where the job says so, and nowhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from harness.errors import HarnessError, JobError
from harness.job.job import DataSection, Job, ModelSection
from harness.plan.profiles import workload_profile
from harness.plan.scenario import job_model
from harness.rank.data import DataFacts, tokenizer_of
from harness.rank.models.model import build_model, draw_model, model_config
from tests.own_code import write_model_with_code

FACTS = DataFacts(vocabulary_size=257)
RAN = "ran.txt"


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of the module: Python keeps the place of the package that transformers makes there."""
    folder = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
        patch.syspath_prepend(folder)
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with code that leaves a file where it runs."""
    folder = write_model_with_code(tmp_path / "toy")
    for source in folder.glob("*.py"):
        mark = f"\nfrom pathlib import Path\nPath({str(tmp_path / RAN)!r}).touch()\n"
        source.write_text(mark + source.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def job(folder: Path, *, weights: str = "random", **model: object) -> Job:
    section = ModelSection(name=str(folder), weights=weights, **model)
    return Job(model=section, data=DataSection(tokenizer="bytes", sequence_length=16))


def test_without_the_switch_one_line_names_it_and_no_code_runs(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        model_config(job(folder), FACTS)
    assert "\n" not in str(caught.value)
    assert "contains custom code" in str(caught.value)
    assert "model.trust_remote_code: true" in str(caught.value)
    assert not (tmp_path / RAN).exists()


def test_with_the_switch_the_folder_builds_its_model(folder: Path, tmp_path: Path) -> None:
    asked = job(folder, trust_remote_code=True)
    model = build_model(asked, model_config(asked, FACTS))
    assert type(model).__name__ == "ToyForCausalLM"
    assert (tmp_path / RAN).exists()


def test_weights_of_the_folder_are_read_by_its_own_class(folder: Path) -> None:
    drawn = job(folder, trust_remote_code=True)
    expected = draw_model(drawn, model_config(drawn, FACTS)).state_dict()
    save_file({n: t * 2 for n, t in expected.items()}, folder / "model.safetensors", {"format": "pt"})
    asked = job(folder, weights="pretrained", trust_remote_code=True)
    read = draw_model(asked, model_config(asked, FACTS)).state_dict()
    assert all(bool((read[name] == expected[name] * 2).all()) for name in expected)


def test_a_class_only_of_the_folder_is_refused_for_another_task(folder: Path) -> None:
    asked = job(folder, trust_remote_code=True).model_copy(update={"task": "seq2seq"})
    with pytest.raises(JobError, match="no encoder and decoder"):
        model_config(asked, FACTS)


def test_estimates_obey_the_switch(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"model\.trust_remote_code: true"):
        job_model(job(folder))
    with pytest.raises(HarnessError, match="does not run for --model"):
        job_model(job(folder, trust_remote_code=True), named=str(folder))
    assert not (tmp_path / RAN).exists()
    planned = job_model(job(folder, trust_remote_code=True))
    assert planned.architecture == "ToyForCausalLM"
    with pytest.raises(HarnessError, match="code of the model's folder"):
        workload_profile(None, planned.config, job(folder, trust_remote_code=True).model)  # type: ignore[arg-type]
    assert planned.layout.parameter_count == 257 * 16 * 2 + 2 * (2 * 16 * 32 + 48)


def test_the_switch_is_part_of_the_job_only_where_it_is_on(folder: Path) -> None:
    off, on = job(folder), job(folder, trust_remote_code=True)
    assert off.job_id() != on.job_id()
    assert "trust_remote_code" not in off.model_dump_json()
    assert Job.model_validate_json(on.model_dump_json()).model.trust_remote_code


def test_the_switch_without_a_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs a `name`"):
        ModelSection(trust_remote_code=True)


def test_a_tokenizer_with_code_is_refused_without_a_question(folder: Path, tmp_path: Path) -> None:
    mapped = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["modeling_toy.T", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(mapped), encoding="utf-8")
    own = Job(model=ModelSection(name=str(folder)))
    with pytest.raises(JobError, match=r"model\.trust_remote_code: true"):
        tokenizer_of(own)
    other = Job(data=DataSection(tokenizer=str(folder)))
    with pytest.raises(JobError, match=r"^data\.tokenizer '.*model's own tokenizer only"):
        tokenizer_of(other)
    assert not (tmp_path / RAN).exists()
