from harness.compare.comparison import Comparison
from harness.record import MemoryPart, Moment
from harness.report.pictures.memory import _kinds
from tests.records import make_record


def test_kinds_are_those_of_the_moment() -> None:
    record = make_record(label="ddp")
    kinds: dict[Moment, dict[str, int]] = {
        "after_forward": {"weights": 10**6, "activations": 5 * 10**6},
        "after_backward": {"weights": 10**6, "gradients": 10**6},
        "during_checkpoint": {"weights": 10**8},
    }
    moments = [
        MemoryPart(step=3, moment=moment, allocated_bytes=None, peak_bytes=None, kinds=held)
        for moment, held in kinds.items()
    ]
    ranks = [rank.model_copy(update={"memory": moments}) for rank in record.ranks]
    (group,) = Comparison([record.model_copy(update={"ranks": ranks})]).groups
    assert _kinds(group, "after_backward") == {"weights": 1.0, "gradients": 1.0}
    assert _kinds(group, "after_forward") == {"weights": 1.0, "activations": 5.0}
