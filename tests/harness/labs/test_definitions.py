"""The labs, their configurations at both scales, and tables that need no run."""

from pathlib import Path

import pytest

from harness.backends import registry
from harness.errors import HarnessError
from harness.job.config import load_experiment
from harness.job.experiment import Experiment
from harness.labs.definitions import LABS, LAYOUTS, Lab, Scale, find_lab
from harness.labs.tables import fill
from harness.shipped import resolve

RUN = [lab for lab in LABS if lab.needs_runs]


def experiments(lab: Lab, scale: Scale) -> list[Experiment]:
    return [
        load_experiment(resolve(Path(name), "configs"))
        for variant in lab.variants
        for name in lab.configurations(variant, scale)
    ]


@pytest.mark.parametrize("scale", ["full", "tiny"])
@pytest.mark.parametrize("lab", RUN, ids=lambda lab: lab.name)
def test_every_configuration_loads_and_names_backends_that_exist(lab: Lab, scale: Scale) -> None:
    for experiment in experiments(lab, scale):
        for label in experiment.compare.backends:
            registry.parse(label)
    assert lab.table in LAYOUTS


@pytest.mark.parametrize("lab", RUN, ids=lambda lab: lab.name)
def test_the_tiny_scale_needs_no_network_and_two_ranks_at_most(lab: Lab) -> None:
    for experiment in experiments(lab, "tiny"):
        assert experiment.model.name is None
        assert experiment.data.tokenizer == "bytes"
        assert max(experiment.compare.world_sizes) <= 2
        assert experiment.data.path is None or experiment.data.path.startswith("/")


def test_a_lab_or_variant_that_does_not_exist_is_refused() -> None:
    with pytest.raises(HarnessError, match=r"lab 'bloom-fdsp' is unknown.*Did you mean 'bloom-fsdp'"):
        find_lab("bloom-fdsp")
    with pytest.raises(HarnessError, match="has no variant as-written"):
        find_lab("llama-finetuning").configurations("as-written", "full")


def test_the_as_written_variants_differ_where_the_public_jobs_do() -> None:
    intended, written = experiments(find_lab("bloom-fsdp"), "full")
    assert (intended.data.targets, written.data.targets) == ("text", "text over prompt")
    assert "auto_wrap=none" in written.compare.backends[0]
    intended, written = experiments(find_lab("custom-gpt"), "full")
    assert (intended.training.accumulation_steps, written.training.accumulation_steps) == (4, 1)


def test_the_talk_prints_these_figures_of_bert() -> None:
    """413.18, 413.18, 826.36 MiB and 1.61 GiB, with 8 KiB of buffers that are no parameters."""
    (table,) = fill(find_lab("model-memory"), [])
    bert = next(row for row in table.rows if row[:2] == ["bert-base-cased", "float32"])
    values = [float(text.split()[0]) for text in bert[2:]]
    assert values[:3] == pytest.approx([413.18, 413.18, 826.36], abs=0.03)
    assert values[3] == 1.61


def test_the_lecture_divides_llama_70b_into_these_shares() -> None:
    """fp32 shards: 4 bytes of each parameter over the GPUs, and as many of each of two moments."""
    (table,) = fill(find_lab("fsdp-lecture"), [])
    rows = {(row[0], row[1]): row for row in table.rows}
    share = 4 * 70_553_706_496 / 1e9
    for gpus in (128, 1280):
        full = rows["fsdp1", str(gpus)]
        assert float(full[2]) == pytest.approx(share / gpus, abs=1e-3)
        assert float(full[5]) == pytest.approx(2 * share / gpus, abs=1e-3)
