"""Names, labels and presets of backends, and where adapters are imported from."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from harness.backends.presets import BUCKET_ELEMENTS, PresetChange, preset_changes
from harness.backends.registry import (
    OTHER_NAMES,
    UnknownBackend,
    canonical_label,
    claimed_strategy,
    create,
    entries,
    parse,
    preset_of,
    strategy_of,
)
from tests.built_in import strategy
from tests.plugins import register

BUILT_IN = [
    "single", "ddp", "replicate", "zero0", "zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op", "fsdp-hybrid",
    "fsdp1", "fsdp1-grad-op", "fsdp1-no-shard", "fsdp1-hybrid", "fsdp1-hybrid-grad-op", "accelerate-ddp",
    "accelerate-zero1", "accelerate-zero2", "accelerate-zero3", "accelerate-fsdp", "accelerate-fsdp1",
    "trainer-ddp", "trainer-fsdp", "trainer-fsdp1", "trainer-zero1", "trainer-zero2", "trainer-zero3",
    "cp", "fsdp-cp", "ulysses-zero1", "ulysses-zero2", "ulysses-zero3",
    "pp", "tp", "fsdp-tp", "autotp-zero1", "autotp-zero2", "autotp-zero3",
]  # fmt: skip
PLUGIN = """
from typing import Literal

from harness.backends.base import Backend, BackendOptions


class MineOptions(BackendOptions):
    size: int = 3
    mode: Literal["a", "b"] = "a"


class Mine(Backend):
    Options = MineOptions

    def prepare(self, build_model, build_optimizer, context):
        raise NotImplementedError  # it is listed and parsed, never run


def not_a_backend():
    return Mine
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed distribution with entry points of every sort; the folder that holds it."""
    (tmp_path / "mine_plugin.py").write_text(PLUGIN)
    entry_points = {
        "mine": "mine_plugin:Mine", "ddp": "mine_plugin:Mine", "not-one": "mine_plugin:not_a_backend",
    }  # fmt: skip
    register(tmp_path, entry_points, "mine-backends", "1.5")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return tmp_path


def refused(label: str) -> str:
    with pytest.raises(UnknownBackend) as caught:
        parse(label)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_built_in_backends_come_in_their_order() -> None:
    assert list(entries())[: len(BUILT_IN)] == BUILT_IN


@pytest.mark.parametrize("name", ["ddp", "zero3", "fsdp-hybrid", "accelerate-fsdp1", "mine"])
def test_every_backend_takes_a_preset(name: str, plugin: Path) -> None:
    label = f"{name}:preset=library-defaults"
    assert canonical_label(label) == label
    assert preset_of(label, "like-for-like") == "library-defaults"
    assert preset_of(name, "like-for-like") == "like-for-like"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("zerro3", "zero3"), ("dpp", "ddp"), ("fdsp", "fsdp"), ("DDP", None),
        ("accelerat-ddp", "accelerate-ddp"),
    ],
)  # fmt: skip
def test_unknown_name_is_refused_with_suggestion(given: str, meant: str | None) -> None:
    message = refused(given)
    assert f"backend '{given}' is unknown" in message
    assert all(name in message for name in BUILT_IN)
    if meant:
        assert message.partition(" Available")[0].endswith(f"Did you mean '{meant}'?")


@pytest.mark.parametrize(
    ("label", "says"),
    [
        ("", "backend '' is unknown"),
        ("zero3:ofload=cpu", "option 'ofload' of backend 'zero3' is unknown. Did you mean 'offload'?"),
        ("accelerate-ddp:offload=cpu", "Allowed: preset, row, sync_each_batch"),
        *(
            (f"zero3:offload{end}", "option 'offload' of backend 'zero3' has no value")
            for end in ("", "=", "= ")
        ),
        ("zero3:offload=cpu,offload=none", "option 'offload' of backend 'zero3' is given twice"),
        ("zero3:reduce_bucket_size=true", "was given True"),
        ("zero3:gradient_clipping=inf", "was given"),
        ("fsdp:prefetch=yes", "was given 'yes'"),
        ("zero3:offload=gpu", "option 'offload' of backend 'zero3' was given 'gpu'"),
        ("zero3:reduce_bucket_size=-1", "option 'reduce_bucket_size' of backend 'zero3' was given -1"),
        ("fsdp-hybrid:shard_size=x", "option 'shard_size' of backend 'fsdp-hybrid' was given 'x'"),
        *((f"zero3:offload={text}", "is not a YAML value") for text in ("[x", "{", "*a", "'x")),
        ("single:preset=library-defaults", "'library-defaults': no preset changes the reference; remove it"),
        (
            "zero3:preset=defaults",
            "preset 'defaults' is unknown. Did you mean 'library-defaults'? Available: like-for-like, "
            "library-defaults",
        ),
    ],
)
def test_what_a_label_cannot_say_is_refused_with_what_it_can(label: str, says: str) -> None:
    assert says in refused(label)


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("ddp", "ddp"),
        (" ddp ", "ddp"),
        ("ddp:", "ddp"),
        ("zero3:reduce_bucket_size=1000,offload=cpu", "zero3:offload=cpu,reduce_bucket_size=1000"),
        ("zero3: offload = cpu , reduce_bucket_size=1000", "zero3:offload=cpu,reduce_bucket_size=1000"),
        ("zero3:reduce_bucket_size=1_000", "zero3:reduce_bucket_size=1000"),
        ("zero2:gradient_clipping=0", "zero2:gradient_clipping=0.0"),
        ("zero1:reduce_bucket_size=null", "zero1"),
        ("zero3:reduce_bucket_size=5e8", "zero3:reduce_bucket_size=500000000"),
        ("zero3:gradient_clipping=0.5,offload=cpu", "zero3:gradient_clipping=0.5,offload=cpu"),
        ("fsdp-hybrid:shard_size=2", "fsdp-hybrid:shard_size=2"),
        ('trainer-ddp:row="0x10"', 'trainer-ddp:row="0x10"'),
    ],
)  # fmt: skip
def test_a_label_has_one_spelling(given: str, canonical: str) -> None:
    assert canonical_label(given) == canonical == canonical_label(canonical)
    assert parse(canonical)[1] == parse(given)[1]


def test_third_party_backend_is_found_and_built(plugin: Path) -> None:
    assert list(entries())[len(BUILT_IN) :] == ["mine", "not-one"]
    backend = create("mine:size=5")
    assert type(backend).__name__ == "Mine"
    assert backend.options.model_dump(exclude={"preset", "row"}) == {"size": 5, "mode": "a"}
    assert "mine-backends" in entries()["mine"].packages
    assert "Did you mean 'size'?" in refused("mine:sise=5")
    assert canonical_label("mine:size=5,mode=b") == "mine:mode=b,size=5"
    assert "must name a subclass of harness.backends.base.Backend" in refused("not-one")


def test_third_party_cannot_take_a_built_in_name(plugin: Path) -> None:
    assert entries()["ddp"].target == "harness.backends.ddp:DdpBackend"
    assert type(create("ddp")).__name__ == "DdpBackend"


@pytest.mark.parametrize("target", ["no_such_module:Mine", "mine_plugin:NoSuchClass"])
def test_entry_point_that_cannot_be_loaded_is_refused(plugin: Path, target: str) -> None:
    info = plugin / "mine_backends-1.5.dist-info" / "entry_points.txt"
    info.write_text(f"[harness.backends]\nbroken = {target}\n")
    importlib.invalidate_caches()
    assert "broken" in refused("broken")


def test_entries_know_their_names_without_torch() -> None:
    script = (
        "import sys; from harness.backends import registry; registry.canonical_label('zero3:offload=cpu'); "
        "[e.options_class() for e in registry.entries().values()]; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_claim_is_what_the_built_in_backend_stands_for_or_refused_with_a_suggestion(
    plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = importlib.import_module("mine_plugin").Mine
    monkeypatch.setattr(mine, "claims", "fsdp-hybrid")
    assert claimed_strategy(create("mine")) == strategy_of("fsdp-hybrid")
    monkeypatch.setattr(mine, "claims", "zerro3")
    with pytest.raises(UnknownBackend, match=r"claims to be 'zerro3'.* Did you mean 'zero3'\?"):
        create("mine")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("ZeRO-3", "'zero3'"),
        ("zero_2", "'zero2'"),
        ("DDP", "'ddp'"),
        ("stage3", "'zero3'"),
        ("deepspeed_stage_1", "'zero1'"),
        ("deepspeed", "'zero1' or 'zero2' or 'zero3'"),
        ("fsdp2", "'fsdp'"),
        ("FULL_SHARD", "'fsdp' or 'fsdp1'"),
        ("Accelerate_FSDP", "'accelerate-fsdp'"),
        ("zero-offload", "'zero2:offload=optimizer' or 'zero3:offload=optimizer'"),
    ],
)
def test_other_spelling_is_refused_with_ours(given: str, meant: str) -> None:
    assert f" is unknown. Did you mean {meant}? Available: {BUILT_IN[0]}, " in refused(given)


def test_other_names_stand_for_backends_that_exist() -> None:
    for labels in OTHER_NAMES.values():
        for label in labels:
            parse(label)


@pytest.mark.parametrize("label", ["pp:stages=2", "zero3:offload=cpu"])
def test_a_label_stands_for_the_strategy_of_its_name(label: str) -> None:
    assert strategy_of(label) == strategy_of(label.partition(":")[0]) is not None
    assert strategy_of("mine") is None


ROOT = Path(__file__).resolve().parents[2]


def python(*arguments: str, cwd: Path, plugins: bool = False) -> subprocess.CompletedProcess[str]:
    """A process with this checkout on its path; with plugins, the working directory too."""
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{cwd}" if plugins else str(ROOT)},
    )  # fmt: skip


def test_a_folder_named_backends_in_the_working_directory_does_not_shadow_ours(tmp_path: Path) -> None:
    (tmp_path / "backends").mkdir()
    (tmp_path / "backends" / "__init__.py").write_text("raise RuntimeError('not ours')\n")
    done = python("-m", "harness", "backends", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "zero3" in done.stdout


def test_a_plugin_that_exits_when_it_is_imported_does_not_end_the_list_of_backends(tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text("raise SystemExit(7)\n")
    register(tmp_path, {"own": "plugin:Own"})
    done = python("-m", "harness", "backends", "--json", cwd=tmp_path, plugins=True)
    assert done.returncode == 0, done.stderr
    assert "backend 'own' (plugin:Own) cannot be loaded: SystemExit: 7" in done.stdout


def changes_of(backend: str, precision: str, preset: str, parameters: int) -> list[PresetChange]:
    return preset_changes(strategy(backend), precision, preset, parameters)


def settings(backend: str, precision: str = "bf16-mixed", parameters: int = 10**9) -> dict[str, object]:
    changes = changes_of(backend, precision, "like-for-like", parameters)
    return {change.setting: change.value for change in changes}


@pytest.mark.parametrize("backend", BUILT_IN)
def test_library_defaults_change_nothing(backend: str) -> None:
    assert changes_of(backend, "bf16-mixed", "library-defaults", 1000) == []


SHARDED = [name for name in BUILT_IN if strategy(name).family not in ("single", "ddp", "pipeline", "tensor")]
WITHOUT_REDUCE_DTYPE = [
    name for name in SHARDED if strategy(name).route == "trainer" and strategy(name).zero_stage is None
]
"""TrainingArguments cannot say in which dtype FSDP reduces."""


@pytest.mark.parametrize("backend", sorted(set(SHARDED) - set(WITHOUT_REDUCE_DTYPE)))
def test_sharded_backends_reduce_in_fp32(backend: str) -> None:
    changed = settings(backend)
    assert "float32" in changed.values() or changed["communication_data_type"] == "fp32"


@pytest.mark.parametrize("backend", WITHOUT_REDUCE_DTYPE)
def test_fsdp_through_trainer_reduces_as_it_computes(backend: str) -> None:
    assert settings(backend) == {}


def test_zero3_keeps_nothing_gathered() -> None:
    changed = settings("zero3", "fp32")
    assert {name: value for name, value in changed.items() if name.startswith("stage3")} == {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
    }
    assert changed["reduce_bucket_size"] == BUCKET_ELEMENTS


def test_buckets_are_no_larger_than_the_model_and_even() -> None:
    assert settings("zero2", "fp32", 1001)["reduce_bucket_size"] == 1002
