"""Lines about the steps of a run: speed where there is one."""

import io

import pytest

from harness.cli.progress import Progress
from harness.run_directory.events import StepEvent
from tests.fake_ranks import STEP
from tests.harness.run_directory.test_events import setup_event
from tests.records import make_effective


@pytest.mark.parametrize(
    ("device_name", "words"),
    [
        ("NVIDIA H100", "loss 10.0000 (rank 0), 1,600 tokens/s"),
        ("CUDA stub", "loss 10.0000 (rank 0)"),
        ("CUDA stub NVIDIA H100", "loss 10.0000 (rank 0)"),
    ],
)
def test_a_stub_has_no_tokens_per_second(
    device_name: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress("ddp", 2, io.StringIO(), plain_lines=True)
    progress(setup_event(make_effective(), device_name=device_name))
    progress(StepEvent(step=0, seconds=0.01, **STEP))
    assert capsys.readouterr().err == f"ddp: step 1/2, {words}\n"
