"""Traces the activation profiles of the catalogue's models and writes the file that ships with the package.

Usage: python -m benchmarks.activation_profiles     (about five seconds a model; profiles that the files have
are kept, so delete them after an update of torch or transformers)
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.forms.activations import to_json
from harness.plan.model import local_config
from harness.plan.models import catalogue_names, load_model
from harness.plan.profiles import SHIPPED, config_key, variant_key
from harness.rank.probes.activation_trace import Variant, trace_profile

CUT, FURTHER = (SHIPPED.with_name(f"activations-{name}.json.xz") for name in ("cut", "further"))
"""Of ranks that divide blocks; of models that the catalogue lists since the other files were written."""
CUT_MODELS = (
    "llama-2-7b", "llama-2-13b", "llama-2-70b", "llama-3-8b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.2-1b",
    "llama-3.2-3b", "mistral-7b-v0.1", "mistral-7b-v0.3", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b",
)  # fmt: skip
"""Also traced as one rank along 'tensor' computes them."""
CUT_RANKS = (2, 4, 8)
CUT_ROUTES = ("cast", "autocast")
ROUTES = ("cast", "autocast", "fp32", "autocast+outputs")


def main() -> None:
    """Trace what is missing, model by model."""
    further = _read(FURTHER)
    document: dict[str, dict[str, Any]] = {}
    for file in SHIPPED.parent.glob("activations*.json.xz"):
        for key, profiles in _read(file).items():
            document.setdefault(key, {}).update(profiles)
    for name in catalogue_names():
        config = load_model(name).config
        if _trace_missing(document, name, config, ROUTES):
            further[config_key(config)] = document[config_key(config)]
            _write(further, FURTHER)
    cut = _read(CUT)
    for name in CUT_MODELS:
        for ranks in CUT_RANKS:
            model = load_model(name)
            if model.config["num_key_value_heads"] % ranks:
                continue
            config = local_config(model.config, ranks)
            if _trace_missing(cut, f"{name} over {ranks}", config, CUT_ROUTES):
                _write(cut, CUT)


def _read(file: Path) -> dict[str, dict[str, Any]]:
    """Profiles by configuration and variant; none of a file that is not there."""
    return json.loads(lzma.decompress(file.read_bytes())) if file.exists() else {}


def _trace_missing(
    document: dict[str, dict[str, Any]], name: str, config: Mapping[str, Any], routes: Sequence[str]
) -> bool:
    """Whether there were any."""
    profiles = document.setdefault(config_key(config), {})
    missing = [variant for variant in _variants(routes) if variant_key(vars(variant)) not in profiles]
    try:
        for variant in missing:
            profiles[variant_key(vars(variant))] = to_json(trace_profile(config, variant))
    except Exception as error:  # a model that cannot be traced is not shipped
        print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
    if missing:
        print(f"{name}: {len(profiles)} profiles", flush=True)
    return bool(missing)


def _variants(routes: Sequence[str]) -> Iterator[Variant]:
    for route in routes:
        for checkpointing in (False, True):
            for single_sample in (True, False):
                yield Variant(route=route, checkpointing=checkpointing, single_sample=single_sample)


def _write(document: dict[str, dict[str, Any]], target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    text = json.dumps({key: value for key, value in document.items() if value}, separators=(",", ":"))
    target.write_bytes(lzma.compress(text.encode(), preset=9))


if __name__ == "__main__":
    try:
        main()
    except HarnessError as error:
        sys.exit(str(error))
