"""The page that says which strategy to take when: every figure in it is what `harness estimate` computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from docs.hooks import sweep_tables, sweeps
from docs.hooks.tables import table
from harness.job.config import load_experiment
from harness.plan.answer import estimate
from harness.plan.hardware import PRESET, TIGHT_SHARE, load_hardware
from harness.plan.models import load_model
from harness.plan.prediction import Prediction
from harness.plan.question import ask

TEMPLATE = "which-strategy.md.jinja"
GPU, SMALL_GPU, PER_NODE = "H100-80", "A100-40", 8
RANKS = (8, 64)
MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen2.5-14b", "qwen2.5-32b", "llama-3.1-70b")
LABELS = ("ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op", "fsdp-hybrid", "fsdp1")
ACCUMULATING = ("zero1", "fsdp", "fsdp-grad-op", "fsdp-hybrid")
"""Those that hold whole gradients between micro-steps; `fsdp1` as `fsdp`."""
ACCUMULATED_MODELS = MODELS[2:]
"""Smaller ones fit under all of these."""
OWNERS = "zero1:use_multi_rank_bucket_allreduce=false"
"""Reduces gradients to the ranks that keep them, which DeepSpeed does not do by default."""
DIVIDED = {
    "tp:tensor=2": "layers", "tp:tensor=8": "layers",
    "fsdp-tp:tensor=2": "layers, and states",
    "fsdp-tp:tensor=8": "layers, and states",
    "autotp-zero1:tensor=2": "layers, and states", "autotp-zero1:tensor=8": "layers, and states",
    "fsdp-cp:sequence=2": "samples, and states",
    "fsdp-cp:sequence=8": "samples, and states",
    "pp:micro_batches=8,stages=2": "blocks", "pp:micro_batches=8,stages=8": "blocks",
    "fsdp:reshard=8": "states; a copy of the weights over a node",
}  # fmt: skip
"""Further ways -> what ranks divide."""
PLAIN = ("ddp", "zero1", "fsdp", "fsdp-hybrid")
"""What these are compared with."""
DIVIDED_MODEL = "llama-3.1-8b"
DIVIDED_SAMPLES = 8
"""Of a micro-step, so that pipelines have micro-batches."""
FABRICS = ("NDR400", "HDR100", "Ethernet-25", "Ethernet-10")
"""From fast to slow."""
ENDS = (FABRICS[0], FABRICS[-1])
STEPS = (1, 4, 16)
"""Micro-steps for each optimizer step."""
SPEED_MODEL = "llama-3.2-3b"
"""The largest of the models that every strategy can train on one node."""
SETTINGS = (
    "training.precision=bf16-mixed",
    "training.activation_checkpointing=true",
    "training.micro_batch_size=1",
    "data.sequence_length=4096",
    f"runtime.preset={PRESET}",
)


KEPT = ("training.activation_checkpointing=false", "training.accumulation_steps=16")
"""What the page's example of `harness recommend` changes of these."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Predictions by model, ranks, fabric, micro-steps and backend."""

    rows: dict[tuple[str, int, str, int, str], Prediction]

    def row(self, model: str, ranks: int, label: str, fabric: str = FABRICS[0], steps: int = 1) -> Prediction:
        return self.rows[model, ranks, fabric, steps, label]

    def gigabytes(self, model: str, ranks: int, label: str) -> float:
        """Memory of the fullest GPU, context and buffers of NCCL included."""
        memory = self.row(model, ranks, label).memory
        assert memory
        return memory.device_bytes / 1e9

    def fits(self, model: str, ranks: int, label: str) -> bool:
        verdict = self.row(model, ranks, label).verdict
        assert verdict
        return verdict.fits

    def answer(self, model: str, ranks: int, label: str) -> str:
        """'fits', 'close' or 'does not fit'."""
        verdict = self.row(model, ranks, label).verdict
        assert verdict
        return verdict.answer

    def largest(self, ranks: int, label: str) -> str:
        """The largest of the models that fits."""
        return [model for model in MODELS if self.fits(model, ranks, label)][-1]

    def sent(self, label: str, steps: int) -> float:
        """GB that a rank sends in one optimizer step on 64 ranks."""
        return (self.row(SPEED_MODEL, RANKS[-1], label, steps=steps).sent_bytes or 0.0) / 1e9

    def speed(self, label: str, fabric: str, steps: int) -> float:
        """Tokens/s for each GPU on 64 ranks."""
        speed = self.row(SPEED_MODEL, RANKS[-1], label, fabric, steps).speed
        assert speed
        return speed.tokens_per_second_per_gpu

    def ratio(self, label: str, other: str, fabric: str, steps: int) -> float:
        """Speed of one strategy over that of another."""
        return self.speed(label, fabric, steps) / self.speed(other, fabric, steps)

    def fastest(self, fabric: str, steps: int) -> float:
        return max(self.speed(label, fabric, steps) for label in LABELS)

    def slower_fabrics(self, label: str, other: str, steps: int, margin: float = 1.05) -> list[str]:
        """Fabrics on which one strategy is faster than another by more than the margin."""
        return [fabric for fabric in FABRICS if self.ratio(label, other, fabric, steps) > margin]

    def faster_rows(self, label: str, other: str) -> str:
        """'12 of 12': rows of the table of networks in which one strategy is faster than another."""
        rows = [self.ratio(label, other, fabric, steps) > 1 for steps in STEPS for fabric in FABRICS]
        return f"{sum(rows)} of {len(rows)}"


@dataclass(frozen=True, kw_only=True)
class Divided:
    """Predictions on 64 GPUs by fabric and backend, of further ways and of plain strategies."""

    rows: dict[tuple[str, str], Prediction]

    def row(self, label: str, fabric: str = FABRICS[0]) -> Prediction:
        return self.rows[fabric, label]

    def gigabytes(self, label: str) -> float:
        """Memory of the fullest GPU."""
        memory = self.row(label).memory
        assert memory
        return memory.device_bytes / 1e9

    def fits(self, label: str) -> bool:
        verdict = self.row(label).verdict
        assert verdict
        return verdict.fits

    def speed(self, label: str, fabric: str) -> float:
        """Tokens/s for each GPU."""
        speed = self.row(label, fabric).speed
        assert speed
        return speed.tokens_per_second_per_gpu

    def slower_on(self, label: str, other: str) -> list[str]:
        """Fabrics of the table on which one strategy is slower than another."""
        return [fabric for fabric in ENDS if self.speed(label, fabric) < self.speed(other, fabric)]


@cache
def divided() -> Divided:
    """Every prediction of the section on dividing the model."""
    hardware = load_hardware()
    found: dict[tuple[str, str], Prediction] = {}
    settings = [s for s in SETTINGS if not s.startswith("training.micro_batch_size")]
    for fabric in ENDS:
        given = ask(
            load_model(DIVIDED_MODEL),
            load_experiment(None, (*settings, f"training.micro_batch_size={DIVIDED_SAMPLES}")),
            backends=(*PLAIN, *DIVIDED),
            world_sizes=RANKS[-1:],
            ranks_per_node=PER_NODE,
            device=hardware.device(GPU),
            fabric=hardware.fabric(fabric),
        )
        found |= {(fabric, row.label): row for row in estimate(given)}
    return Divided(rows=found)


@cache
def figures() -> Figures:
    """Every prediction that the page shows."""
    hardware = load_hardware()
    asked: list[tuple[str, tuple[int, ...], str, int]] = [(model, RANKS, FABRICS[0], 1) for model in MODELS]
    asked += [(SPEED_MODEL, RANKS[-1:], fabric, steps) for fabric in FABRICS for steps in STEPS]
    found: dict[tuple[str, int, str, int, str], Prediction] = {}
    for model, ranks, fabric, steps in asked:
        given = ask(
            load_model(model),
            load_experiment(None, (*SETTINGS, f"training.accumulation_steps={steps}")),
            backends=(*LABELS, OWNERS),
            world_sizes=ranks,
            ranks_per_node=PER_NODE,
            device=hardware.device(GPU),
            fabric=hardware.fabric(fabric),
        )
        for row in estimate(given):
            label = row.label if row.label in LABELS else OWNERS
            found[model, row.world_size, fabric, steps, label] = row
    return Figures(rows=found)


@cache
def accumulated() -> Figures:
    """Predictions of the strategies that need more memory with several micro-steps, with the most of them."""
    hardware = load_hardware()
    found: dict[tuple[str, int, str, int, str], Prediction] = {}
    for model in ACCUMULATED_MODELS:
        given = ask(
            load_model(model),
            load_experiment(None, (*SETTINGS, f"training.accumulation_steps={STEPS[-1]}")),
            backends=ACCUMULATING,
            world_sizes=RANKS,
            ranks_per_node=PER_NODE,
            device=hardware.device(GPU),
            fabric=hardware.fabric(FABRICS[0]),
        )
        found |= {(model, row.world_size, FABRICS[0], 1, row.label): row for row in estimate(given)}
    return Figures(rows=found)


@cache
def kept_gigabytes() -> float:
    """Memory of what `harness recommend` takes in the page's example, which recomputes no activations."""
    hardware = load_hardware()
    given = ask(
        load_model("llama-3.1-8b"),
        load_experiment(None, (*SETTINGS, *KEPT)),
        backends=("zero1",), world_sizes=RANKS[-1:], ranks_per_node=PER_NODE, device=hardware.device(GPU),
        fabric=hardware.fabric(FABRICS[0]),
    )  # fmt: skip
    (row,) = estimate(given)
    assert row.memory
    return row.memory.device_bytes / 1e9


def strategies_page() -> str:
    """The page in Markdown."""
    given = figures()
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.get_template(TEMPLATE).render(
        figures=given,
        fit_table=_fit_table(given, MODELS, LABELS),
        accumulated=accumulated(),
        accumulated_table=_fit_table(accumulated(), ACCUMULATED_MODELS, ACCUMULATING),
        link_table=_link_table(given),
        sent_table=_sent_table(given),
        divided=divided(),
        divided_table=_divided_table(divided()),
        divided_model=DIVIDED_MODEL,
        divided_samples=DIVIDED_SAMPLES,
        sweeps=sweeps,
        tables=sweep_tables,
        limit=load_hardware().device(GPU).memory_bytes / 1e9,
        small_limit=load_hardware().device(SMALL_GPU).memory_bytes / 1e9,
        tight=TIGHT_SHARE,
        kept_gigabytes=kept_gigabytes(),
        settings=SETTINGS,
        speed_model=SPEED_MODEL,
        owners=OWNERS,
    )


def _fit_table(given: Figures, models: Sequence[str], labels: Sequence[str]) -> str:
    head = ["model", "GPUs", *labels]
    rows = []
    for model in models:
        for ranks in RANKS:
            cells = []
            for label in labels:
                text = f"{given.gigabytes(model, ranks, label):,.0f}"
                text = f"~{text}" if given.answer(model, ranks, label) == "close" else text
                cells.append(text if given.fits(model, ranks, label) else f"({text})")
            rows.append([model, str(ranks), *cells])
    return table(head, rows, words=1)


def _link_table(given: Figures) -> str:
    head = ["micro-steps", "network", *LABELS]
    rows = []
    for steps in STEPS:
        for fabric in FABRICS:
            best = given.fastest(fabric, steps)
            shares = [given.speed(label, fabric, steps) / best for label in LABELS]
            rows.append([str(steps), fabric, *map(_share, shares)])
    return table(head, rows, words=2)


def _sent_table(given: Figures) -> str:
    head = ["micro-steps", *LABELS]
    return table(
        head, [[str(n), *(f"{given.sent(label, n):.1f}" for label in LABELS)] for n in STEPS], words=0
    )


def _divided_table(given: Divided) -> str:
    head = ["strategy", "ranks divide", "GB", "bubble", "GB in node", "GB between", *ENDS]
    rows = []
    for label in (*PLAIN, *DIVIDED):
        row = given.row(label)
        sent, between = row.sent_bytes or 0.0, row.between_bytes or 0.0
        memory = f"{given.gigabytes(label):,.0f}"
        rows.append([
            f"`{label}`", DIVIDED.get(label, ""),
            memory if given.fits(label) else f"({memory})",
            "" if row.bubble is None else f"{row.bubble:.0%}",
            f"{(sent - between) / 1e9:,.1f}", f"{between / 1e9:,.1f}",
            *(f"{given.speed(label, fabric):,.0f}" for fabric in ENDS),
        ])  # fmt: skip
    return table(head, rows, words=2)


def _share(share: float) -> str:
    return f"**{share:.0%}**" if round(share, 2) >= 0.95 else f"{share:.0%}"
