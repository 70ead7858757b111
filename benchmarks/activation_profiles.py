"""Traces the activation profiles of the catalogue's models and writes the file that ships with the package.

Usage: python -m benchmarks.activation_profiles     (about an hour; profiles that the file has are kept, so
delete it after an update of torch or transformers)
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Iterator
from typing import Any

from harness.errors import HarnessError
from harness.planning.models import catalogue_names, load_model
from harness.planning.profiles import SHIPPED, config_key, variant_key
from harness.theory.activations import to_json
from harness.worker.activation_trace import Variant, trace_profile

ROUTES = ("cast", "autocast", "fp32", "autocast+outputs")


def main() -> None:
    """Trace what is missing, model by model."""
    document: dict[str, dict[str, Any]] = {}
    if SHIPPED.exists():
        document = json.loads(lzma.decompress(SHIPPED.read_bytes()))
    for file in SHIPPED.parent.glob("activations-*.json.xz"):  # profiles traced apart
        document = json.loads(lzma.decompress(file.read_bytes())) | document
    for name in catalogue_names():
        model = load_model(name)
        profiles = document.setdefault(config_key(model.config), {})
        missing = [variant for variant in _variants() if variant_key(vars(variant)) not in profiles]
        try:
            for variant in missing:
                profiles[variant_key(vars(variant))] = to_json(trace_profile(model.config, variant))
        except Exception as error:  # a model that cannot be traced is not shipped
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
        if missing:
            _write(document)
            print(f"{name}: {len(profiles)} profiles", flush=True)


def _variants() -> Iterator[Variant]:
    for route in ROUTES:
        for checkpointing in (False, True):
            for single_sample in (True, False):
                yield Variant(route=route, checkpointing=checkpointing, single_sample=single_sample)


def _write(document: dict[str, dict[str, Any]]) -> None:
    SHIPPED.parent.mkdir(exist_ok=True)
    text = json.dumps({key: value for key, value in document.items() if value}, separators=(",", ":"))
    SHIPPED.write_bytes(lzma.compress(text.encode(), preset=9))


if __name__ == "__main__":
    try:
        main()
    except HarnessError as error:
        sys.exit(str(error))
