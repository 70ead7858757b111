"""Settings of the job under strategies whose ranks share samples.

Each pair trains as the reference does, with states and bytes as expected, or is refused before ranks start.
"""

import pytest

from docs.hooks.pairs import LABELS, OFFLOAD, has_offload, refused, settings_of
from harness.job.pairs import AXES
from harness.judge.quantities import expected_model_state_bytes, volume_differences
from harness.record import Record
from tests.built_in import MULTIPLYING
from tests.traps.clean import assert_clean
from tests.traps.matrix import Matrix

from .test_optimizers import MODEL

pytestmark = pytest.mark.long(seconds=20)
RANKS = {"fsdp-tp": 4}
"""Where two ranks leave nothing to shard; two elsewhere."""
LIBRARIES = {"optimizer.kind=adamw-8bit": "torchao", "optimizer.kind=adamw-8bit-bnb": "bitsandbytes"}
LARGE = MODEL % (128, 128, 2)
"""Four ranks' parts of its matrices are multiples of 256 elements, and of 4,096 at least."""


def _typed(label: str, option: str = "") -> str:
    options = [*(["correct_gradients=True"] if label in MULTIPLYING else []), *([option] if option else [])]
    return f"{label}:{','.join(options)}" if options else label


def test_a_refused_pair_is_a_row_with_its_reason_and_starts_no_rank(matrix: Matrix) -> None:
    record: Record = matrix.record("tp", 2, ("loss.chunk_tokens=16",))
    assert record.status == "unsupported"
    assert record.reasons[0].startswith("loss.chunk_tokens along 'tensor': ")
    assert not list((matrix.store.root / record.run_id).glob("rank*"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("setting", AXES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_pair_runs_as_the_reference_or_is_refused(setting: str, ranks: int, matrix: Matrix) -> None:
    settings = settings_of(setting)
    if setting in LIBRARIES:
        pytest.importorskip(LIBRARIES[setting], reason="an extra is not installed")
        settings.append(LARGE)
    labels = [label for label in LABELS if RANKS.get(label, 2) == ranks]
    for label in labels:
        if (reason := refused(label, setting)) is not None:
            record = matrix.record(_typed(label), ranks, tuple(settings))
            assert (record.status, record.reasons) == ("unsupported", [reason])
    run = [_typed(label) for label in labels if refused(label, setting) is None]
    if run:
        _assert_as_expected(assert_clean(run, ranks, settings, matrix, derived=False))


@pytest.mark.exhaustive
def test_every_offload_runs_as_the_reference(matrix: Matrix) -> None:
    labels = [_typed(label, OFFLOAD) for label in LABELS if has_offload(label)]
    _assert_as_expected(assert_clean(labels, 2, [], matrix, derived=False))


def _assert_as_expected(records: dict[str, Record]) -> None:
    for label, record in records.items():
        if label == "single":
            continue
        assert volume_differences(record) in ([], None), label
        assert expected_model_state_bytes(record) is not None, label
