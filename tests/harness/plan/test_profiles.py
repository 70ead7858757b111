"""Which profile a scenario gets, and that the shipped ones are what tracing gives today."""

import json
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.activation_profiles import ROUTES
from harness.backends.registry import strategy_of
from harness.errors import HarnessError
from harness.forms.activations import to_json
from harness.forms.layout import Layout
from harness.forms.workload import Workload
from harness.plan import profiles
from harness.plan.models import catalogue_names, load_model
from harness.plan.profiles import (
    TRACER,
    Tracer,
    config_key,
    find_profile,
    precision_route,
    request_text,
    traced,
)
from harness.rank.probes.activation_trace import Variant, profile_text, trace_profile
from tests.patience import SECONDS
from tests.tracing import ONE

pytestmark = pytest.mark.long(seconds=12)

SHIPPED: dict[str, Any] = {"attention": None, "device": "cuda"}


def workload(label: str, **settings: Any) -> Workload:
    nothing = Layout(parameters=(), decaying=frozenset())
    return Workload(layout=nothing, strategy=strategy_of(label), world_size=2, **settings)


@pytest.mark.parametrize(
    ("label", "route", "settings"),
    [
        ("ddp", "fp32", {"precision": "fp32"}),
        ("ddp", "autocast", {}),
        ("ddp", "cast", {"precision": "bf16"}),
        ("accelerate-ddp", "autocast+outputs", {}),
        *((label, "cast", {}) for label in ("zero3", "accelerate-zero3", "fsdp", "accelerate-fsdp")),
        # Accelerate puts autocast on top of FSDP1, unless like for like turns it off.
        ("accelerate-fsdp1", "cast+autocast+outputs", {"preset": "library-defaults"}),
        ("accelerate-fsdp", "cast", {"preset": "library-defaults"}),
    ],
)
def test_low_precision_comes_about_as_the_backend_has_it(
    label: str, route: str, settings: dict[str, Any]
) -> None:
    assert precision_route(workload(label, **({"precision": "bf16-mixed"} | settings))) == route


def test_every_decoder_of_the_catalogue_ships_with_its_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m benchmarks.activation_profiles` traces what is missing. Encoders are not traced, mixtures of
    experts neither under autocast nor in fp32."""
    monkeypatch.setattr(profiles, "traced", lambda request, _: pytest.fail(f"not shipped: {request}"))
    for config in (load_model(name).config for name in catalogue_names()):
        if config["model_type"] in ("bert", "t5"):
            continue
        is_mixture = any(key in config for key in ("num_experts", "num_local_experts"))
        for route in ("cast",) if is_mixture else ROUTES:
            for checkpointing, single in product((False, True), repeat=2):
                flags = {"checkpointing": checkpointing, "single_sample": single}
                find_profile(config, **SHIPPED, route=route, **flags)


def test_the_number_of_blocks_does_not_change_a_profile() -> None:
    config = load_model("Llama-3.1-8B").config
    assert config_key(config) == config_key({**config, "num_hidden_layers": 2})
    assert config_key(config) != config_key({**config, "hidden_size": 8})


@pytest.mark.parametrize(
    ("name", "route", "checkpointing", "single_sample"),
    [("Llama-3.1-8B", "cast", True, True), ("gpt2", "autocast", False, False)],
)
def test_a_shipped_profile_is_what_tracing_gives(
    monkeypatch: pytest.MonkeyPatch, name: str, route: str, checkpointing: bool, single_sample: bool
) -> None:
    monkeypatch.setattr(profiles, "traced", lambda *_: pytest.fail("traced although a profile ships"))
    config = load_model(name).config
    flags = {"route": route, "checkpointing": checkpointing, "single_sample": single_sample}
    shipped = find_profile(config, **SHIPPED, **flags)
    assert shipped == trace_profile(config, replace(Variant(), **flags))


@pytest.mark.costly
def test_one_process_traces_what_this_one_does_says_what_it_cannot_and_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Tracer, "__call__", ONE)
    config = load_model("gpt2").config | {"n_embd": 24, "n_head": 2, "vocab_size": 50}
    requests = [
        request_text(config, asdict(Variant(checkpointing=checkpointing))) for checkpointing in (False, True)
    ]
    unknown = request_text({"model_type": "no such model"}, {})
    with Tracer() as trace:
        for request in requests:
            assert to_json(traced(request, trace)) == json.loads(profile_text(request))
            with pytest.raises(HarnessError, match="of a no such model cannot be traced without data"):
                trace(unknown)
        process = trace._process
        monkeypatch.setattr(profiles, "TRACING_SECONDS", 0.0)
        with pytest.raises(HarnessError, match=r"took over 0\.0 s"):
            trace(requests[0])
        assert process.returncode is not None
        monkeypatch.setattr(profiles, "TRACER", "no_such_module")
        monkeypatch.setattr(profiles, "TRACING_SECONDS", SECONDS)
        with pytest.raises(HarnessError, match=r"activations ended: .*No module named no_such_module"):
            trace(requests[0])
        monkeypatch.setattr(profiles, "TRACER", TRACER)
        assert json.loads(trace(requests[0]))
        process = trace._process
    assert process.returncode is not None


def test_a_block_of_llama_saves_what_counting_by_hand_gives() -> None:
    """Weights and activations in bf16, bytes per token: h 4096, f 14336, 32 heads, 8 of keys and values.

    Each of two norms: its input in fp32 (4 h), the inverse root (4), the normalised input (2 h), its result,
    which the products after it need (2 h). Attention: queries, keys, values, its result, and the log-sum-exp
    of each head in fp32. MLP: gate, activated gate, up and their product (2 f each).
    """
    config = load_model("Llama-3.1-8B").config
    profile = find_profile(config, **SHIPPED, route="cast", checkpointing=False, single_sample=True)
    h, f, heads, keys = 4096, 14336, 32, 8 * 128
    norms = 2 * (4 * h + 4 + 2 * h + 2 * h)
    attention = 2 * h + 2 * keys + 2 * keys + 2 * h + 4 * heads
    assert str(profile.block.held) == f"{norms + attention + 4 * 2 * f} s"
