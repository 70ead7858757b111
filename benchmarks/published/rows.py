"""The published runs as a CSV file has them: figures with repository, commit, path and line."""

from __future__ import annotations

import csv
import re
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from harness.errors import HarnessError

OPTIONAL = frozenset({"note", "ep", "cp", "offload", "global_batch_seqs", "framework", "settings"})
"""Columns that a file may lack."""
UNSAID = "not said"
"""Which peak a page has published."""


def figure(text: str) -> float | None:
    """A positive number; None: there is none."""
    with suppress(ValueError):
        found = float(text)
        return found if 0 < found < float("inf") else None
    return None


@dataclass(frozen=True)
class Row:
    """One run; text as published, empty where nothing was said."""

    id: str
    source: str
    tier: str
    model: str
    params: str
    seq_len: str
    micro_batch: str
    grad_accum: str
    global_batch_seqs: str
    method: str
    precision: str
    activation_ckpt: str
    compile: str
    attention: str
    optimizer: str
    strategy: str
    tp: str
    pp: str
    cp: str
    ep: str
    offload: str
    n_gpus: str
    gpus_per_node: str
    gpu: str
    status: str
    memory_gib_per_gpu: str
    memory_statistic: str
    tokens_per_s_per_gpu: str
    repo: str
    commit: str
    path: str
    line: str
    note: str
    framework: str = ""
    """The program that ran, as `programs.yaml` names those whose code was read."""
    settings: str = ""
    """What its configuration sets and the page does not say, as `--set` and a backend's options have it:
    'adapter.rank=64 overlap_comm=true'."""

    @property
    def memory_bytes(self) -> float | None:
        gib = figure(self.memory_gib_per_gpu)
        return None if gib is None else gib * 2**30

    @property
    def tokens_per_second(self) -> float | None:
        return figure(self.tokens_per_s_per_gpu)

    @property
    def rate(self) -> float | None:
        """Tokens, samples or steps per second, whichever was published: for comparisons within a source."""
        samples = re.search(r"samples_per_s=([\d.]+)", self.note)
        if self.tokens_per_second is not None or samples is None:
            return self.tokens_per_second
        return figure(samples[1])

    @property
    def global_batch(self) -> str:
        """Samples of a step of one GPU, which are those of all GPUs by their number; '': not said."""
        sizes = (self.micro_batch, self.grad_accum or "1")
        return str(int(sizes[0]) * int(sizes[1])) if all(size.isdecimal() for size in sizes) else ""

    @property
    def gpus(self) -> int:
        return int(self.n_gpus) if self.n_gpus.isdecimal() else 1

    @property
    def statistic(self) -> str:
        """'allocated', 'reserved', 'device' or UNSAID."""
        text = self.memory_statistic.lower()
        if "which one is not said" in text:
            return UNSAID
        if "reserved" in text and "allocated" not in text:
            return "reserved"
        if "allocated" in text and "reserved" not in text:
            return "allocated"
        if "device" in text or "nvidia-smi" in text:
            return "device"
        return UNSAID

    @property
    def tried(self) -> bool:
        """Whether the run was attempted and its outcome is known for sure: it fitted, or it did not."""
        return self.fitted is not None

    @property
    def fitted(self) -> bool | None:
        """None: whether memory was the reason is not known."""
        status = self.status.lower()
        if status == "ok":
            return True
        return False if status == "oom" or "memory at its limit" in status else None


def _plain(text: str) -> str:
    """A whole number is one however it is written: '16.0', '4,096'."""
    plain = re.sub(r"^(\d+)\.0*$", r"\1", text.strip())
    return plain.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+", plain) else plain


COLUMNS = tuple(field.name for field in fields(Row))


def read_rows(path: Path) -> list[Row]:
    """Read the runs. Raises HarnessError for a file without the columns."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [c for c in COLUMNS if c not in (reader.fieldnames or ()) and c not in OPTIONAL]
            if missing:
                raise HarnessError(f"{path} lacks the columns {', '.join(missing)}")
            return [Row(**{c: _plain(line.get(c) or "") for c in COLUMNS}) for line in reader]
    except OSError as error:
        raise HarnessError(f"published runs {path} cannot be read: {error.strerror}") from error
