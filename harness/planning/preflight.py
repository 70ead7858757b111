"""Whether a run will have the memory that it needs, judged before its ranks start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from harness.forms.dtypes import COMPUTE, DTYPE_BYTES
from harness.planning.limits import Limits
from harness.planning.memory import MemoryPrediction, predict_memory
from harness.planning.scenario import Scenario
from harness.planning.setup import setup_bytes
from harness.planning.traced import Trace
from harness.planning.verdict import Answer, Verdict
from harness.record import PredictionPart

DISTRIBUTION = "sharding-harness"
AT_LEAST = "at least"
"""In place of the moment, where a lower bound is all that is known."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Memory that is needed at one place, and what there is."""

    needed_bytes: int
    limit_bytes: int
    place: str
    on_device: bool = False
    """Of a rank's own; otherwise of the host."""

    @property
    def share(self) -> float:
        """Of the limit."""
        return self.needed_bytes / max(1, self.limit_bytes)

    @property
    def answer(self) -> Answer:
        return Verdict(needed_bytes=self.needed_bytes, device_bytes=self.limit_bytes).answer

    def __str__(self) -> str:
        """'131 GB of 80 GB per rank'."""
        return f"{size(self.needed_bytes)} of {size(self.limit_bytes)} {self.place}"


def predict_run(
    scenario: Scenario, limits: Limits, *, data_bytes: int = 0, trace: Trace | None = None
) -> PredictionPart:
    """The prediction of one run as its record keeps it. Raises HarnessError where none can be made.

    `data_bytes`: what samples hold on the host, where ranks on the CPU have their tensors too.
    """
    prediction = predict_memory(scenario, trace)
    return judged(scenario, prediction, limits, data_bytes if scenario.torch_device == "cpu" else 0)


def judged(
    scenario: Scenario, prediction: MemoryPrediction, limits: Limits, data_bytes: int = 0
) -> PredictionPart:
    """A prediction beside the memory that there is."""
    kinds = {"data": data_bytes} if data_bytes else {}
    for term in prediction.decisive.terms:
        if not term.host:
            kinds[term.kind] = kinds.get(term.kind, 0) + term.bytes
    part = PredictionPart(
        peak_bytes=prediction.peak_bytes + data_bytes,
        moment=prediction.decisive.name,
        kinds=kinds,
        device_bytes=prediction.device_bytes + data_bytes,
        device_limit_bytes=_smallest(limits.device_bytes, limits.imposed_bytes),
        host_bytes=_host_bytes(scenario, prediction) + data_bytes * _ranks_per_node(scenario),
        host_limit_bytes=limits.host_bytes,
        made_by=_made_by(),
    )
    return _with_verdict(part, _ranks_per_node(scenario))


def least_on_host(
    parameters: int,
    precision: str,
    world_size: int,
    ranks_per_node: int,
    limits: Limits,
    *,
    trained: int | None = None,
) -> PredictionPart:
    """What ranks on the CPU hold under any strategy: each weight and its optimizer states once among all.

    A bound for runs that nothing better is known of, such as those of a third party's backend. `trained`: how
    many of the parameters have optimizer states; None: all.
    """
    kinds = {"weights": parameters, "optimizer": 2 * (parameters if trained is None else trained)}
    width = DTYPE_BYTES[COMPUTE["bf16" if precision == "bf16" else "fp32"]]
    shares = {kind: count * width // world_size for kind, count in kinds.items()}
    rank_bytes = sum(shares.values())
    part = PredictionPart(
        peak_bytes=rank_bytes, moment=AT_LEAST, kinds=shares, device_bytes=rank_bytes,
        device_limit_bytes=limits.imposed_bytes, host_bytes=rank_bytes * min(ranks_per_node, world_size),
        host_limit_bytes=limits.host_bytes, made_by=_made_by(),
    )  # fmt: skip
    return _with_verdict(part, min(ranks_per_node, world_size))


def at_least(scenario: Scenario, limits: Limits) -> PredictionPart:
    """What the model states need, of a job whose activations are not predicted.

    A model from `model.factory` is whole once on a machine, or on each of its ranks before a library cuts it.
    """
    terms = [term for term in scenario.states.terms if scenario.torch_device == "cpu" or not term.host]
    kinds: dict[str, int] = {}
    for term in terms:
        kinds[term.kind] = kinds.get(term.kind, 0) + term.bytes
    held = sum(kinds.values())
    on_host = (
        held if scenario.torch_device == "cpu" else sum(t.bytes for t in scenario.states.terms if t.host)
    )
    ranks = _ranks_per_node(scenario)
    built = setup_bytes(scenario) if scenario.job.model.factory else 0
    builders = ranks if scenario.model.whole_because else 1
    part = PredictionPart(
        peak_bytes=held, moment=AT_LEAST, kinds=kinds, device_bytes=held,
        device_limit_bytes=_smallest(limits.device_bytes, limits.imposed_bytes),
        host_bytes=max(on_host * ranks, built * builders), host_limit_bytes=limits.host_bytes,
        made_by=_made_by(),
    )  # fmt: skip
    return _with_verdict(part, ranks)


def _with_verdict(part: PredictionPart, ranks_per_node: int) -> PredictionPart:
    tightest = tightest_demand(part, ranks_per_node)
    return part.model_copy(update={"verdict": tightest.answer if tightest else None})


def tightest_demand(part: PredictionPart, ranks_per_node: int) -> Demand | None:
    """Where least would be left, or most is missing; None: no limit is known."""
    return max(_demands(part, ranks_per_node), key=lambda demand: demand.share, default=None)


def telling_demand(part: PredictionPart, ranks_per_node: int, torch_device: str) -> Demand | None:
    """What a person wants to know: the device of a run on GPUs, unless the host decides against the run."""
    tightest = tightest_demand(part, ranks_per_node)
    if torch_device == "cpu" or tightest is None or tightest.answer != "fits":
        return tightest
    return next((demand for demand in _demands(part, ranks_per_node) if demand.on_device), None)


def _demands(part: PredictionPart, ranks_per_node: int) -> Iterator[Demand]:
    if part.device_limit_bytes is not None:
        yield Demand(
            needed_bytes=part.device_bytes,
            limit_bytes=part.device_limit_bytes,
            place="per rank",
            on_device=True,
        )
    if part.host_limit_bytes is not None:
        yield Demand(
            needed_bytes=part.host_bytes // ranks_per_node,
            limit_bytes=part.host_limit_bytes // ranks_per_node,
            place="host memory per rank",
        )


def _host_bytes(scenario: Scenario, prediction: MemoryPrediction) -> int:
    """Of a node: while all of its ranks build the model, or in a step, whichever is more."""
    ranks = _ranks_per_node(scenario)
    in_step = prediction.host_bytes_per_node
    if scenario.torch_device == "cpu":
        in_step = prediction.peak_bytes * ranks
    return max(in_step, setup_bytes(scenario) * ranks)


def _ranks_per_node(scenario: Scenario) -> int:
    return min(scenario.ranks_per_node, scenario.world_size)


def _made_by() -> str:
    """'sharding-harness 0.1.0'; a checkout that is not installed has no version."""
    try:
        return f"{DISTRIBUTION} {version(DISTRIBUTION)}"
    except PackageNotFoundError:
        return f"{DISTRIBUTION}, not installed"


def _smallest(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def size(count: float) -> str:
    """Bytes in GB, or MB below one: '131 GB', '0.62 MB'."""
    unit, name = (1e9, "GB") if count >= 1e9 else (1e6, "MB")
    value = count / unit
    return f"{value:,.0f} {name}" if value >= 100 else f"{value:.3g} {name}"
