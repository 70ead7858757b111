"""Valid files of every kind that the harness reads, small ones: what mutations start from."""

import io
import json
import lzma
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from harness.fabric.result import FabricResult, FabricRow
from harness.plan.calibration import Calibration, CellFit
from harness.record.store import record_text
from tests.harness.imported.files import every_file
from tests.harness.tell.hostile import hostile_records
from tests.records import JOB, make_record

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "reports" / "default" / "runs.tar.xz"
OF_PUBLISHED = ("single", "zero3", "fsdp", "accelerate-zero2")


def texts_of(folder: str, *, ending: str = ".yaml") -> list[bytes]:
    """The files below a folder of the checkout with this ending."""
    return [path.read_bytes() for path in sorted((ROOT / folder).rglob(f"*{ending}"))]


def parsed(texts: list[bytes]) -> list[Any]:
    """Their documents."""
    return [json.loads(json.dumps(YAML(typ="safe", pure=True).load(text.decode()))) for text in texts]


@cache
def jobs() -> list[bytes]:
    return texts_of("harness/shipped/configs") + texts_of("configs")


@cache
def sites() -> list[bytes]:
    return texts_of("harness/shipped/sites")


@cache
def hardware() -> list[Any]:
    """Files of a user's own devices and networks."""
    devices, fabrics, _ = parsed(texts_of("harness/plan/catalogue/hardware"))
    some = [dict(list(entries.items())[:3]) for entries in (devices, fabrics)]
    return [{"devices": some[0], "fabrics": some[1]}]


@cache
def configurations(tool: str) -> list[dict[str, Any]]:
    """Documents of Accelerate or DeepSpeed."""
    return [document for kind, document in every_file().values() if kind == tool]


@cache
def records() -> list[dict[str, Any]]:
    """Written for tests, of an earlier commit, and published ones."""
    own = [*hostile_records("name"), make_record()]
    first = json.loads((ROOT / "tests/harness/record/published.json").read_text(encoding="utf-8"))
    return [*(json.loads(record_text(record)) for record in own), first, *_published()]


def _published() -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    with tarfile.open(PUBLISHED) as tar:
        for member in tar:
            name = member.name.rpartition("/")[0].partition("-n")[0][-40:]
            label = next((label for label in OF_PUBLISHED if name.endswith(f"-{label}")), None)
            if label is not None and label not in found and member.isfile():
                found[label] = json.load(tar.extractfile(member))  # type: ignore[arg-type]
    return list(found.values())


@cache
def archive() -> bytes:
    """Three records, packed."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in ("a", "b", "c"):
            data = record_text(make_record(run_id=name)).encode()
            member = tarfile.TarInfo(f"runs/{name}/record.json")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return packed.getvalue()


def packed(tar: bytes) -> bytes:
    return lzma.compress(tar, preset=0)


@cache
def calibrations() -> list[Any]:
    cell = CellFit(
        cell="ddp", group="here", measured_seconds=1.0, spread=0.1, fitted_seconds=1.0, left_out_seconds=1.05
    )
    constants = {"step_overhead_seconds": 5.0}
    document = Calibration(device="A100-80", transport="nccl", constants=constants, cells=[cell, cell])
    return [document.model_dump(mode="json")]


@cache
def fabrics() -> list[Any]:
    row = FabricRow(op="all_reduce", ranks=[0, 1], size_bytes=1024, repeats=10, seconds=[1e-5])
    result = FabricResult(
        created_at="2026-01-02T03:04:05+00:00", transport="gloo", device="cpu", hosts=["a", "a"],
        interface=None, rows=[row],
    )  # fmt: skip
    return [result.model_dump(mode="json")]


@cache
def checkpoints() -> list[Any]:
    document = {
        "format": "neutral", "native_format": "torch", "run_id": "run", "backend": "ddp", "world_size": 2,
        "job_id": "0" * 12, "job": JOB, "step": 2, "updates": 2, "weights_digest": "0" * 64,
    }  # fmt: skip
    return [document]
