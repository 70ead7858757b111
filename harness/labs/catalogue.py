"""Which labs there are, and which configurations each consists of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.backends.explain import available
from harness.errors import HarnessError
from harness.shipped import MARK, names

Variant = Literal["as-intended", "as-written"]
Scale = Literal["full", "tiny"]
TableKind = Literal[
    "scaling",
    "stages",
    "strategies",
    "custom",
    "weak",
    "images",
    "dtypes",
    "times",
    "waits",
    "lecture",
    "memory",
]
KAUST = "https://github.com/kaust-rccl/Dist-DL-training"


@dataclass(frozen=True, kw_only=True)
class Lab:
    """One job of a document, or several that fill one table."""

    name: str
    title: str
    source: str
    """Whose it is, with an address where it is public."""
    table: TableKind
    full: tuple[str, ...] = ()
    """Names of the configurations; none: arithmetic, no run."""
    tiny: tuple[str, ...] = ()
    """The same for two CPU ranks."""

    def configurations(self, variant: Variant, scale: Scale) -> list[str]:
        """What `--config` takes for each part. Raises HarnessError for a variant that the lab lacks."""
        ending = "" if variant == "as-intended" else f".{variant}"
        folder = "labs/" if scale == "full" else "labs/tiny/"
        found = [f"{MARK}{folder}{part}{ending}" for part in (self.full if scale == "full" else self.tiny)]
        shipped = names("configs")
        if any(name not in shipped for name in found) or (ending and not found):
            raise HarnessError(
                f"lab '{self.name}' has no variant {variant}: nothing is known to be wrong with it"
            )
        return found

    @property
    def needs_runs(self) -> bool:
        return bool(self.full)

    @property
    def variants(self) -> tuple[Variant, ...]:
        written = bool(self.tiny) and f"{MARK}labs/tiny/{self.tiny[0]}.as-written" in names("configs")
        return ("as-intended", "as-written") if written else ("as-intended",)


def _same(*parts: str) -> dict[str, tuple[str, ...]]:
    return {"full": parts, "tiny": parts}


LABS = (
    Lab(
        name="bloom-fsdp", title="BLOOM-560M on SQuAD under FSDP, 1 to 8 GPUs",
        source=f"KAUST, {KAUST}, fsdp/bloom", table="scaling", **_same("bloom-fsdp"),
    ),
    Lab(
        name="bloom-fsdp-guide", title="Every FSDP strategy with and without CPU offload",
        source="KAUST, text of the FSDP guide; no job of it exists", table="strategies",
        **_same("bloom-fsdp-guide"),
    ),
    Lab(
        name="bloom-deepspeed", title="BLOOM-560M on SQuAD under ZeRO 0 to 3 with and without offload",
        source=f"KAUST, {KAUST}, deepspeed", table="stages", **_same("bloom-deepspeed"),
    ),
    Lab(
        name="bloom-deepspeed-scaling", title="ZeRO-2 on 1 to 8 GPUs",
        source=f"KAUST, {KAUST}, deepspeed", table="stages", **_same("bloom-deepspeed-scaling"),
    ),
    Lab(
        name="custom-gpt", title="A small GPT under FSDP, 1 to 8 GPUs",
        source=f"KAUST, {KAUST}, fsdp/custom_model", table="custom", **_same("custom-gpt"),
    ),
    Lab(
        name="custom-gpt-weak", title="Weak scaling of a GPT that grows with the GPUs",
        source=f"KAUST, {KAUST}, fsdp/custom_model/weak_scaling", table="weak",
        full=tuple(f"custom-gpt-weak-{ranks}" for ranks in (2, 4, 8, 16)),
        tiny=("custom-gpt-weak-1", "custom-gpt-weak-2"),
    ),
    Lab(
        name="ddp-images", title="An image classifier under DDP, 1 to 8 GPUs",
        source=f"KAUST, {KAUST}, ddp", table="images", **_same("ddp-images"),
    ),
    Lab(
        name="bert-classification", title="BERT on pairs of sentences under DDP, FSDP and DeepSpeed",
        source="talk by the lead of Accelerate", table="strategies", **_same("bert-classification"),
    ),
    Lab(
        name="llama-finetuning", title="Llama fine-tuned on 1 to 8 GPUs of two nodes",
        source="CINECA, course on Accelerate's FSDP, 2026", table="times", full=("llama-finetuning",),
        tiny=("llama-finetuning", "llama-finetuning-strategies"),
    ),
    Lab(
        name="dtypes", title="Dtypes of weights, gradients and optimizer states in FSDP and DeepSpeed",
        source="talk by the lead of Accelerate", table="dtypes", **_same("dtypes"),
    ),
    Lab(
        name="model-memory", title="Memory estimate by dtype of bert-base-cased and Llama-3-8B",
        source="talk by the lead of Accelerate", table="memory",
    ),
    Lab(
        name="fsdp-prefetch", title="Where compute waits for communication, by prefetch and gathers ahead",
        source="graduate lecture on FSDP", table="waits", **_same("fsdp-prefetch"),
    ),
    Lab(
        name="fsdp-lecture", title="Llama 70B on 128 and 1,280 GPUs: memory and bytes by strategy",
        source="graduate lecture on FSDP", table="lecture",
    ),
)  # fmt: skip


def find_lab(name: str) -> Lab:
    """The lab of this name. Raises HarnessError."""
    by_name = {lab.name: lab for lab in LABS}
    if name not in by_name:
        raise HarnessError(f"lab '{name}' is unknown. {available(name, by_name)}")
    return by_name[name]
