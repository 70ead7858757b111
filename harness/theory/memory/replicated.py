"""Model states of strategies that shard nothing: one process, and DistributedDataParallel."""

from __future__ import annotations

from harness.theory.memory.terms import (
    ADAM_MOMENTS,
    ModelStates,
    Setting,
    Term,
    buffer_terms,
    elements,
    states,
    step_counters,
)


def replicated_states(setting: Setting, *, reducer: bool) -> ModelStates:
    """P elements of weights and of gradients, 2 P of Adam, and one step counter per parameter.

    `reducer`: DistributedDataParallel is there. Its buckets hold every gradient once more, without
    padding (torch 2.13, `csrc/distributed/c10d/reducer.cpp`, `Reducer::initialize_buckets`), unless
    `gradient_as_bucket_view` makes the gradients views of them; like-for-like sets it.
    `single:precision=cast` computes with a copy of the module (`backends/cast_engine.py`).
    """
    parameters = setting.layout.parameters
    count = elements(parameters)
    size = count * setting.trained_bytes
    terms = [
        Term(kind="weights", name="whole weights", bytes=size),
        Term(kind="gradients", name="whole gradients", bytes=size),
        Term(kind="optimizer", name="Adam's moments", bytes=ADAM_MOMENTS * size),
        step_counters(len(parameters)),
        *buffer_terms(setting),
    ]
    if setting.options.get("precision") == "cast" and setting.compute_bytes < setting.trained_bytes:
        copy = count * setting.compute_bytes
        terms += [
            Term(kind="gathered", name="low-precision copy of the weights", bytes=copy, extra=True),
            *buffer_terms(setting),
        ]
    if reducer and setting.preset != "like-for-like":
        terms.append(
            Term(kind="communication", name="DDP's buckets, beside the gradients", bytes=size, extra=True)
        )
    return states(terms)
