"""Accelerate's configuration in this project's terms: DDP, FSDP1, FSDP2 and the DeepSpeed plugin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from harness.backends import registry
from harness.backends.refusals import choices
from harness.imported import reading
from harness.imported.deepspeed import label_of, read_deepspeed, require_registered, zero_offload
from harness.imported.reading import KEYS as KEYS_BY_KIND
from harness.nested import leaves

STRATEGIES = {
    "FULL_SHARD": "fsdp1",
    "SHARD_GRAD_OP": "fsdp1-grad-op",
    "NO_SHARD": "fsdp1-no-shard",
    "HYBRID_SHARD": "fsdp1-hybrid",
    "HYBRID_SHARD_ZERO2": "fsdp1-hybrid-grad-op",
}
"""FSDP1's sharding strategies in the order of their numbers, from 1, and the backends."""
DEFAULTS = (
    "auto_wrap_policy", "backward_prefetch", "forward_prefetch", "limit_all_gathers",
    "activation_checkpointing",
)  # fmt: skip
"""Fields of Accelerate's plugin of FSDP that decide a run where their keys are absent."""
RESHARDS = {True: "fsdp", False: "fsdp-grad-op"}
"""FSDP2's `reshard_after_forward`."""
TYPES = ("MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED")
STOPS = "Accelerate refuses it next to deepspeed_config_file; set it in that file"
KEYS = KEYS_BY_KIND["accelerate"]
PREFIXES = {
    "fsdp_config": "fsdp_",
    "deepspeed_config": "deepspeed_",
    "parallelism_config": "parallelism_config_",
    "dynamo_config": "dynamo_",
}
"""Sections with the prefix that their keys may lack."""
OF_TYPE = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED"}
"""Sections that Accelerate reads for one distributed_type only."""
LOADS, SYNCS = "fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states"
"""`prepare_multi_gpu_env` stops where the first is true and the second is not."""
IGNORED_WITH_FILE = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)  # fmt: skip
"""Accelerate stops if one of these stands next to `deepspeed_config_file` (`DeepSpeedPlugin`)."""
COMPILE_KEYS = (
    "dynamo_backend",
    "dynamo_config.dynamo_backend",
    "dynamo_config.dynamo_use_regional_compilation",
)
GROUPED = {
    "dp_replicate_size": ("{backend}-hybrid", "shard_size"), "tp_size": ("{backend}-tp", "tensor"),
    "cp_size": ("{backend}-cp", "sequence"), "sp_size": ("ulysses-{backend}", "sequence"),
}  # fmt: skip
"""Names of backends that have groups of ranks, and the option of their size."""
ROTATIONS = {"allgather": "all-gather", "alltoall": "all-to-all"}
"""`cp_comm_strategy` and the option `rotation`."""


def read_accelerate(
    document: Mapping[str, Any], folder: Path, refusals: reading.Refusals
) -> reading.Imported | None:
    """None where something was refused. `folder`: where a `deepspeed_config_file` counts from."""
    document = dict(document)
    sections = {}
    for name, prefix in PREFIXES.items():
        given = document.get(name) or {}
        if not isinstance(given, dict):
            refusals.add(name, given, "it must be a section")
            given = {}
        # As `accelerate launch` names them: keys of FSDP may lack their prefix.
        sections[name] = {
            f"{prefix}{key}" if f"{name}.{prefix}{key}" in KEYS else key: value
            for key, value in given.items()
        }
    document |= {name: section for name, section in sections.items() if name in document}
    kind = str(document.get("distributed_type", "")).upper()
    if kind not in TYPES:
        reason = f"the harness runs {choices(kind, TYPES)}"
        if kind == "NO":
            reason += "; one process is the reference of every comparison, 'single'"
        refusals.add("distributed_type", document.get("distributed_type"), reason)
    idle = []
    for name, of in OF_TYPE.items():
        if kind != of and name in document:
            rule = reading.Rule(kind="not_used", target=f"distributed_type is {kind}")
            given = leaves(document.pop(name), (name,))
            idle += [
                reading.KeyResolution(name=".".join(keys), given=value, rule=rule) for keys, value in given
            ]
            sections[name] = {}
    fsdp = sections["fsdp_config"]
    given = fsdp.get("fsdp_version", 1)
    how = "give 1 or 2"
    version = refusals.choose("fsdp_config.fsdp_version", given, range(1, 3), how)
    compiled = dict.fromkeys(COMPILE_KEYS, _compiled(document, sections["dynamo_config"], refusals))
    at = ("fsdp_version", version)
    resolutions = (
        reading.resolutions_of(document, KEYS, reading.SECTIONS["accelerate"], refusals, compiled, at) + idle
    )
    found = reading.Imported(backend="ddp", resolutions=[])
    if kind == "FSDP":
        found = _fsdp(fsdp, version, refusals)
    elif kind == "DEEPSPEED":
        found = _deepspeed(sections["deepspeed_config"], document, folder, refusals)
    backend, options = _parallel(found.backend, found.options, sections["parallelism_config"], refusals)
    require_registered(backend, options, refusals)
    if refusals.found:
        return None
    used = label_of(backend, options)
    resolutions = [replace(c, used=used) if c.rule.kind == "chooses" else c for c in resolutions]
    resolutions += found.resolutions
    if "mixed_precision" not in document and "deepspeed_config_file" not in sections["deepspeed_config"]:
        default = reading.precision(reading.library_defaults("accelerate")["mixed_precision"])
        resolutions.append(_default("mixed_precision", default))
    return replace(found, backend=backend, options=options, resolutions=resolutions)


def _default(key: str, value: Any) -> reading.KeyResolution:
    """Resolution of a key that the file does not give."""
    return reading.KeyResolution(name=key, given=None, rule=KEYS[key], value=value, is_absent=True)


def _compiled(document: Mapping[str, Any], section: Mapping[str, Any], refusals: reading.Refusals) -> str:
    """`model.compile` of the job."""
    backend = str(section.get("dynamo_backend", document.get("dynamo_backend")) or "no").lower()
    if backend == "no":
        return "none"
    if backend != "inductor":
        refusals.add("dynamo_backend", backend, "unsupported: model.compile uses torch's inductor only")
    key = "dynamo_use_regional_compilation"
    regional = refusals.read(reading.boolean, f"dynamo_config.{key}", section.get(key, False), False)
    return "block" if regional else "model"


def _parallel(
    backend: str, options: dict[str, Any], section: Mapping[str, Any], refusals: reading.Refusals
) -> tuple[str, dict[str, Any]]:
    """The backend with the groups of ranks that `parallelism_config` asks for."""
    asked = {}
    for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
        key = f"parallelism_config_{name}"
        given = 1 if section.get(key) is None else section[key]
        asked[name] = refusals.read(reading.integer, f"parallelism_config.{key}", given, 1)
    others = {name: size for name, size in asked.items() if size > 1 and name != "dp_shard_size"}
    if not others:
        return backend, options
    (name, size), *more = others.items()
    family, option = GROUPED[name]
    wanted = family.format(backend=backend)
    if more or wanted not in registry.entries():
        near = sorted({found for known, _ in GROUPED.values() for found in registry.entries()
                       if fnmatch(found, known.format(backend="*"))})  # fmt: skip
        refusals.add(
            "parallelism_config", {f"parallelism_config_{name}": size for name, size in others.items()},
            f"unsupported: no backend of this version takes them with {backend}; it takes {', '.join(near)}",
        )  # fmt: skip
        return backend, options
    found = {**options, option: asked["dp_shard_size"] if name == "dp_replicate_size" else size}
    strategy = section.get("parallelism_config_cp_comm_strategy")
    if name == "cp_size" and strategy is not None:
        if strategy not in ROTATIONS:
            refusals.add("parallelism_config.parallelism_config_cp_comm_strategy", strategy,
                         f"give {choices(str(strategy), ROTATIONS)}")  # fmt: skip
        found["rotation"] = ROTATIONS.get(strategy, "all-gather")
    return wanted, found


def _fsdp(section: Mapping[str, Any], version: int, refusals: reading.Refusals) -> reading.Imported:
    where = "fsdp_config."
    if section.get(LOADS, True) and not section.get(SYNCS, True):
        why = f"Accelerate itself refuses it with {LOADS}, which is true by default"
        why += "; set it to true, or both to false"
        refusals.add(f"{where}{SYNCS}", section[SYNCS], why)
    if version == 2 and str(kind := section.get("fsdp_state_dict_type", "")).upper() == "LOCAL_STATE_DICT":
        refusals.add(f"{where}fsdp_state_dict_type", kind, "Accelerate itself refuses it with fsdp_version 2")
    backend = _fsdp2(section, refusals) if version == 2 else _fsdp1(section, refusals)
    given = section.get("fsdp_offload_params", False)
    offload = refusals.read(reading.boolean, f"{where}fsdp_offload_params", given, False)
    # Accelerate's defaults of absent keys: the plugin's fields have their names without the prefix.
    defaults, absent = reading.library_defaults("accelerate")[f"fsdp{version}"], []
    for name in DEFAULTS:
        key = f"{where}fsdp_{name}"
        is_read = KEYS[key].is_read(version)
        if is_read and f"fsdp_{name}" not in section and (convert := KEYS[key].convert) is not None:
            value = defaults[name]
            is_off = value is None and convert is reading.boolean
            absent.append(_default(key, False if is_off else convert(value)))
    return reading.Imported(
        backend=backend, options={"offload": "cpu"} if offload else {}, resolutions=absent
    )  # fmt: skip


def _fsdp1(section: Mapping[str, Any], refusals: reading.Refusals) -> str:
    key = "fsdp_sharding_strategy"
    given = section.get(key, "FULL_SHARD")
    name = str(given).upper()
    if name.isdigit() and 1 <= int(name) <= len(STRATEGIES):
        name = list(STRATEGIES)[int(name) - 1]
    if name not in STRATEGIES:
        refusals.add(f"fsdp_config.{key}", given, f"FSDP1 has {choices(name, STRATEGIES)}")
    return STRATEGIES.get(name, "fsdp1")


def _fsdp2(section: Mapping[str, Any], refusals: reading.Refusals) -> str:
    given = section.get("fsdp_reshard_after_forward", True)
    try:
        return RESHARDS[reading.boolean(given)]
    except ValueError:
        key = "fsdp_config.fsdp_reshard_after_forward"
        refusals.add(key, given, "with fsdp_version 2 give true or false")
        return RESHARDS[True]


def _deepspeed(
    section: Mapping[str, Any], document: Mapping[str, Any], folder: Path, refusals: reading.Refusals
) -> reading.Imported:
    where = "deepspeed_config."
    if (named := section.get("deepspeed_config_file")) not in (None, "none"):
        return _from_file(named, section, document, folder, refusals)
    defaults = reading.library_defaults("accelerate")["deepspeed"]
    given = section.get("zero_stage", defaults["zero_stage"])
    stage = refusals.choose(f"{where}zero_stage", given, range(4), "give 0, 1, 2 or 3")
    device = {
        name: str(section.get(f"{name}_device") or defaults[f"{name}_device"]).lower()
        for name in ("offload_optimizer", "offload_param")
    }
    absent = [
        _default(where + key, defaults[key])
        for key in ("gradient_accumulation_steps", "gradient_clipping")
        if key not in section and defaults[key] != reading.AUTO
    ]
    options = zero_offload(stage, device, refusals, where)
    return reading.Imported(backend=f"zero{stage}", options=options, resolutions=absent)


def _from_file(
    named: Any,
    section: Mapping[str, Any],
    document: Mapping[str, Any],
    folder: Path,
    refusals: reading.Refusals,
) -> reading.Imported:
    """The row of a DeepSpeed JSON that an Accelerate file names, with the JSON's keys after its name."""
    where, nothing = "deepspeed_config.", reading.Imported(backend="zero2", resolutions=[])
    if not isinstance(named, str):
        refusals.add(f"{where}deepspeed_config_file", named, "give the path of a JSON file")
        return nothing
    for key in IGNORED_WITH_FILE:
        if key in section:
            refusals.add(f"{where}{key}", section[key], STOPS)
    if document.get("mixed_precision") is not None:
        refusals.add("mixed_precision", document["mixed_precision"], STOPS)
    # Accelerate counts from the working directory; a file that lies next to the YAML is found too.
    near = folder / named
    path = near if near.exists() or not Path(named).exists() else Path(named)
    file = reading.read_file(path, "DeepSpeed configuration")
    refusals.prefix = f"{Path(named).name}: "
    found = read_deepspeed(file.document, refusals)
    refusals.prefix = ""
    return found or nothing
