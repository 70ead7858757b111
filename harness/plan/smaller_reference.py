"""Settings with which the reference of a comparison fits, where it does not fit as asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from harness.plan.architectures import find_architecture
from harness.plan.model import LAYER_KEYS
from harness.plan.models import from_config
from harness.plan.scenario import Scenario, with_settings


def smaller_reference(reference: Scenario, samples: int, fits: Callable[[Scenario], bool]) -> str | None:
    """The settings that change least: '--set training.micro_batch_size=1'; None: none was found.

    samples: in a micro-step of the ranks that are compared. First the reference takes as many, which changes
    nothing of theirs, or all take one; then the model has fewer layers.
    """
    total = reference.samples
    cuts = {
        f"--set training.micro_batch_size={size}": replace(
            reference, micro_batch_size=size, accumulation_steps=total // size
        )
        for size in (samples, 1)
        if total % size == 0
    }
    for setting, cut in cuts.items():
        if cut.micro_batch_size < reference.micro_batch_size and fits(cut):
            return setting
    for setting, cut in cuts.items():
        for fewer, smaller in _with_fewer_layers(cut):
            if fits(smaller):
                return f"--set {fewer} {setting}"
    return None


def _with_fewer_layers(reference: Scenario) -> Iterator[tuple[str, Scenario]]:
    """Half of them, a quarter and so on; nothing of a model that is no configuration."""
    job = reference.job
    if job.model.name is not None or job.model.factory is not None:
        return
    values = job.model.config_values()
    key = next((key for key in LAYER_KEYS if isinstance(values.get(key), int)), None)
    if key is None or find_architecture(str(values.get("model_type"))) is None:
        return
    layers = values[key] // 2
    while layers:
        setting = f"model.config.{key}"
        changed = with_settings(reference, {setting: layers})
        if changed is not None:
            config = {**reference.model.config, **_layers(reference, key, layers)}
            model = from_config(config, name=reference.model.name, source=reference.model.source)
            yield f"{setting}={layers}", replace(changed, model=model)
        layers //= 2


def _layers(reference: Scenario, key: str, layers: int) -> dict[str, int]:
    """Under each name that the configuration has for them."""
    return {key: layers} | {name: layers for name in LAYER_KEYS if name in reference.model.config}
