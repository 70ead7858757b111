"""Site files: what is refused, and how it is said."""

from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.slurm.matrix import Site, load_site, time_seconds, with_time_limit

SITES = Path(__file__).resolve().parents[3] / "slurm" / "sites"


def refused(tmp_path: Path, text: str) -> str:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(HarnessError) as caught:
        load_site(path)
    return str(caught.value)


@pytest.mark.parametrize("path", sorted(SITES.glob("*.yaml")), ids=lambda path: path.stem)
def test_example_sites_load(path: Path) -> None:
    assert load_site(path).name == path.stem


def test_leonardo_has_four_gpus_per_node() -> None:
    site = load_site(SITES / "leonardo.yaml")
    assert (site.gpus_per_node, site.device, site.cpus_per_rank) == (4, "cuda", 8)


def test_unknown_key_is_refused_with_the_closest_one(tmp_path: Path) -> None:
    said = refused(tmp_path, "name: a\npartiton: b\n")
    assert "'partiton' is unknown" in said
    assert "Did you mean 'partition'?" in said


def test_missing_name_is_said(tmp_path: Path) -> None:
    assert "'name': Field required" in refused(tmp_path, "partition: b\n")


def test_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="cannot be read"):
        load_site(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('partition: "a\\nb"', "one line"),
        ('constraint: "a\\u2028b"', "one line"),
        ("time_limit: tomorrow", "must be a time"),
        ('time_limit: "1:00:00\\n"', "must be a time"),
        ('time_limit: "0"', "above 0"),
        ('time_limit: "0-00:00:00"', "above 0"),
        ('time_limit: "25:99:99"', "must be a time"),
        ('time_limit: "٣٠"', "must be a time"),
        ("memory_per_node: lots", "such as 120G"),
        ('time_limit: "1"', "notice_seconds is 60, which is not below the time limit 1"),
        ('time_limit: "10:00"\nnotice_seconds: 601', "notice_seconds is 601"),
        ('one_rank_time_limit: "1"', "not below the time limit 1"),
        ("environment: {SLURM_JOB_ID: x}", "SLURM_JOB_ID is Slurm's or the job script's own"),
        ("environment: {run: x}", "run is Slurm's"),
        ("environment: {MASTER_PORT: x}", "MASTER_PORT is Slurm's"),
        ('environment: {"A B": x}', "not the name of a variable"),
        ('environment: {"A": "x\\0y"}', "zero byte"),
        ('options: {"nice\\nid": 1}', "not a long option"),
        ("options: {time: 5}", "written by the harness"),
        ("options: {tim: 5}", "written by the harness"),
        ("options: {wait: true}", "could not follow the job"),
        ("options: {clusters: b}", "could not follow the job"),
        ("partition: a\noptions: {partition: b}", "given twice"),
        ('options: {comment: "a\\nb"}', "one line"),
        ("gpu_type: a100", "needs gpus_per_node"),
        ("launcher: mpirun", "torchrun"),
        ("require_busbw: fast", "is not a rate"),
    ],
)
def test_what_no_script_could_hold_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in refused(tmp_path, f"name: a\n{text}\n")


def test_machine_differs_between_partitions() -> None:
    assert Site(name="a", partition="x").machine != Site(name="a", partition="y").machine


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800), ("30:15", 1815), ("01:00:00", 3600), ("2-0", 172800), ("1-02:03", 93780),
        ("1-02:03:04", 93784), ("tomorrow", 0), ("1:00:00\n", 0),
    ],
)  # fmt: skip
def test_times_are_read_as_slurm_does(text: str, seconds: int) -> None:
    assert time_seconds(text) == seconds


@pytest.mark.parametrize(
    ("time", "said"), [("tomorrow", "must be a time"), ("00:01:00", "not below the time limit 00:01:00")]
)
def test_another_time_limit_is_refused_in_one_line(time: str, said: str) -> None:
    with pytest.raises(HarnessError, match=said) as caught:
        with_time_limit(Site(name="a"), time)
    assert str(caught.value).startswith(f"--time {time}: ")
    assert "\n" not in str(caught.value)
