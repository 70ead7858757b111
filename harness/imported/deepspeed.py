"""DeepSpeed's JSON in this project's terms."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, get_args

from harness.backends import registry
from harness.backends.base import OptimizerKind
from harness.backends.options import NO_FILES
from harness.backends.refusals import choices
from harness.imported import reading
from harness.nested import leaves, removed, value_at

ZERO = "zero_optimization"
PRECISION_KEYS = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")
"""Decide together."""
PURE_BF16_KEYS = ("bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states")
COMPILE_KEYS = ("compile.enabled", "compile.disable")
"""Either of them switches torch.compile; `disable` wins."""
OPTIMIZER_KEYS = ("optimizer.type", "optimizer.params.adam_w_mode")
"""Decide together."""
SGD = "SGD"
"""Torch's own, of whose optimizers DeepSpeed takes any that is spelled as its class."""
PARALLEL = {
    ("autotp", "tensor"): "tensor_parallel.autotp_size",
    ("ulysses", "sequence"): "sequence_parallel_size",
}
"""Families of backends with the option of their ranks, and the key that asks for them."""
OFFLOAD_OF: dict[tuple[str, str], str | None] = {
    ("none", "none"): None, ("cpu", "none"): "optimizer", ("cpu", "cpu"): "cpu",
}  # fmt: skip
"""The option `offload` by the devices of optimizer states and weights."""
OLD_OFFLOAD = {
    "offload_optimizer": ("cpu_offload",), "offload_param": ("cpu_offload_param", "cpu_offload_params"),
}  # fmt: skip
"""Sections of offload, and the switches that earlier versions had."""
SCALING: dict[str, Any] = {"prescale_gradients": False, "gradient_predivide_factor": 1.0}
"""How gradients are divided around their sum, with DeepSpeed's defaults."""
DIVIDES_BEFORE = reading.Rule(
    kind="not_used", target="DeepSpeed reads it only where prescale_gradients is off"
)
LEFT_TO_THE_JOB = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
"""Arguments of schedulers that Accelerate and Trainer fill in where they are 'auto'."""


def read_deepspeed(document: Mapping[str, Any], refusals: reading.Refusals) -> reading.Imported | None:
    """None where something was refused.

    Raises HarnessError where the installed DeepSpeed cannot be asked for its defaults.
    """
    zero = document.get(ZERO, {})
    if isinstance(zero, bool):  # the form of DeepSpeed's first versions, which it still reads
        zero = {"stage": int(zero)}
    if not isinstance(zero, dict):
        refusals.add(ZERO, zero, "give a section with 'stage'")
        return None
    stage = refusals.choose(f"{ZERO}.stage", zero.get("stage", 0), range(4), "give 0, 1, 2 or 3")
    defaults = reading.deepspeed_values(stage)
    given = {key: reading.at(document, key) for key in (*PRECISION_KEYS, *PURE_BF16_KEYS)}
    try:
        precision = _precision(document)
    except ValueError as error:
        refusals.add("bf16 and fp16", {key: value for key, value in given.items() if value}, str(error))
        precision = reading.AUTO
    together = dict.fromkeys(given, precision)
    # 'auto' of one key stays the job's, whatever the other says, unless that one decides.
    together |= {key: reading.AUTO for key, value in given.items() if value == reading.AUTO}
    together |= dict.fromkeys(OPTIMIZER_KEYS, _optimizer_kind(document, refusals))
    together |= dict.fromkeys(COMPILE_KEYS, _compiled(document, refusals))
    sections = reading.SECTIONS["deepspeed"]
    keys = reading.with_defaults(reading.KEYS["deepspeed"], defaults)
    if reading.alike(zero.get("reduce_scatter", True), False):
        for name in SCALING:
            keys[name] = replace(keys[name], at=None)
    if reading.alike(document.get("prescale_gradients", False), True):
        keys["gradient_predivide_factor"] = DIVIDES_BEFORE
    for name, begins in {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}.items():
        if precision != reading.AUTO and not precision.startswith(begins):
            off = reading.Rule(kind="not_used", target=f"{name} is off")
            idle = [key for key, rule in keys.items() if key.startswith(f"{name}.") and not rule.refuses]
            keys |= {key: off for key in idle if key not in together}
    kept = _without_removed(document, refusals)
    _refuse_as_deepspeed(document, zero, stage, refusals)
    resolutions = reading.resolutions_of(kept, keys, sections, refusals, together, ("stage", stage))
    device = {}
    for name, old in OLD_OFFLOAD.items():
        section = zero.get(name)
        device[name] = "cpu" if any(zero.get(key) is True for key in old) else "none"
        if isinstance(section, dict):
            device[name] = str(section.get("device", "none")).lower()
        elif section not in (None, False):
            refusals.add(f"{ZERO}.{name}", section, "give a section with 'device'")
    options = zero_offload(stage, device, refusals, f"{ZERO}.")
    backend, more = _parallel(stage, document, refusals)
    options |= more
    settings = _scheduled(document, refusals)
    require_registered(backend, options, refusals)
    if refusals.found:
        return None
    absent = _absent(document, defaults, precision, options)
    resolutions += [reading.KeyResolution(name=refusals.prefix + key, given=None, is_absent=True,
                                  rule=keys.get(key) or sections["scheduler.params"],
                                  value=value) for key, value in absent.items()]  # fmt: skip
    used, found = label_of(backend, options), []
    for key in resolutions:
        found.append(replace(key, used=used) if key.rule.kind == "chooses" else key)
        if key.name.endswith("optimizer.params.betas"):  # one key and two settings
            second = (
                reading.AUTO
                if key.value == reading.AUTO
                else float((key.value if key.is_absent else key.given)[1])
            )
            found[-1] = replace(key, value=float(key.value[0])) if key.is_absent else key
            found.append(replace(key, rule=reading.Rule(kind="job", target="optimizer.beta2"), value=second))
    return reading.Imported(backend=backend, options=options, resolutions=found, settings=settings)


def _without_removed(document: Mapping[str, Any], refusals: reading.Refusals) -> dict[str, Any]:
    """The document without keys that the installed DeepSpeed refuses whatever their value."""
    kept = deepcopy(dict(document))
    for key, why in reading.library_defaults("deepspeed")["removed"].items():
        keys = tuple(key.split("."))
        if removed(kept, keys):
            given = value_at(dict(document), keys)
            refusals.add(key, given, f"DeepSpeed itself refuses it, also switched off: {why}; leave it out")
    return kept


def _refuse_as_deepspeed(
    document: Mapping[str, Any], zero: Mapping[str, Any], stage: int, refusals: reading.Refusals
) -> None:
    """Refuse what assertions of DeepSpeed 0.19.8 stop (config.py, stage_1_and_2.py, stage3.py)."""
    if stage in (2, 3) and not reading.alike(zero.get("reduce_scatter", True), False):
        for key, default in SCALING.items():
            if not reading.alike(given := document.get(key, default), default):
                why = f"DeepSpeed itself refuses it at stage {stage} with reduce_scatter; leave it out"
                refusals.add(key, given, why)
    if reading.alike(zero.get("compute_grad_norm", True), False) and (
        stage not in (1, 2) or not reading.alike(document.get("gradient_clipping", 1.0), 0)
    ):
        why = "DeepSpeed itself refuses it but at stages 1 and 2 with gradient_clipping 0; leave it out"
        refusals.add(f"{ZERO}.compute_grad_norm", False, why)
    if stage == 0 and reading.alike(reading.at(document, PURE_BF16_KEYS[0]), True):
        refusals.add(PURE_BF16_KEYS[0], True, "DeepSpeed itself refuses it at stage 0")


def require_registered(backend: str, options: Mapping[str, Any], refusals: reading.Refusals) -> None:
    """Refuse what the registry of this version does not know, in its own words."""
    if refusals.found:
        return
    try:
        registry.canonical_label(label_of(backend, options))
    except registry.UnknownBackend as error:
        refusals.found.append(f"{refusals.prefix}unsupported: {error}")


def label_of(backend: str, options: Mapping[str, Any]) -> str:
    """'zero3:offload=cpu', as a person types it."""
    text = ",".join(f"{key}={str(value).lower() if isinstance(value, bool) else value}"
                    for key, value in options.items())  # fmt: skip
    return f"{backend}:{text}" if text else backend


def _parallel(
    stage: int, document: Mapping[str, Any], refusals: reading.Refusals
) -> tuple[str, dict[str, Any]]:
    """The backend of a stage, and the ranks that cut layers (AutoTP) or samples (Ulysses)."""
    asked = []
    for (family, option), key in PARALLEL.items():
        given = reading.at(document, key)
        size = 1 if given is None else refusals.read(reading.integer, key, given, 1)
        if size > 1:
            asked.append((family, {option: size}, key, given))
    if not asked:
        return f"zero{stage}", {}
    (family, options, key, given), *others = asked
    backend = f"{family}-zero{stage}"
    if others:
        both = " and ".join(refusals.prefix + key for key in PARALLEL.values())
        refusals.found.append(f"unsupported: no backend of this version combines {both}")
    elif backend not in registry.entries():
        stages = [name for name in registry.entries() if name.startswith(f"{family}-zero")]
        why = f"unsupported: at stage {stage}; this version has {', '.join(stages)}"
        refusals.add(key, given, why)
    return backend, options


def _compiled(document: Mapping[str, Any], refusals: reading.Refusals) -> str:
    """'model' or 'none' of `model.compile`."""
    section = document.get("compile") or {}
    if not isinstance(section, dict):
        refusals.add("compile", section, "give a section with 'enabled'")
        return "none"
    try:
        if "disable" in section:
            return "none" if reading.boolean(section["disable"]) else "model"
        return "model" if reading.boolean(section.get("enabled", False)) else "none"
    except ValueError as error:
        refusals.add("compile", section, str(error))
        return "none"


def _optimizer_kind(document: Mapping[str, Any], refusals: reading.Refusals) -> str:
    """'adamw', 'sgd', or 'adam': with `adam_w_mode` false, DeepSpeed's adds weight decay to gradients."""
    section = document.get("optimizer")
    if not isinstance(section, dict):
        return "adamw"
    given, params = section.get("type"), section.get("params")
    if given is None:
        refusals.add("optimizer", section, "give its 'type', without which DeepSpeed ignores it")
    elif given == SGD:
        return "sgd"
    elif str(given).lower() not in ("adam", "adamw"):
        kinds = ", ".join(get_args(OptimizerKind))
        why = f"unsupported: only Adam, AdamW and {SGD} are run; `optimizer.kind` has {kinds}"
        refusals.add("optimizer.type", given, why)
    mode = params.get("adam_w_mode", True) if isinstance(params, dict) else True
    decoupled = refusals.read(reading.boolean, "optimizer.params.adam_w_mode", mode, True)
    return "adamw" if decoupled or str(given).lower() == "adamw" else "adam"


def _scheduled(document: Mapping[str, Any], refusals: reading.Refusals) -> dict[str, Any]:
    """Settings of the job's schedule; empty: the file has no scheduler."""
    section = document.get("scheduler")
    if not section:
        return {}
    if not isinstance(section, dict):
        refusals.add("scheduler", section, "give a section with 'type' and 'params'")
        return {}
    known = reading.library_defaults("deepspeed")["schedulers"]
    name, params = section.get("type"), section.get("params") or {}
    if not isinstance(name, str) or name not in known:
        refusals.add("scheduler.type", name, f"give {choices(str(name), known)}")
        return {}
    where = "scheduler.params"
    if not isinstance(params, dict):
        refusals.add(where, params, "give a section")
        return {}
    required, defaults = known[name]["required"], known[name]["defaults"]
    allowed = [*required, *defaults]
    for key in params:
        if key not in allowed:
            refusals.unknown(f"{where}.{key}", [f"{where}.{one}" for one in allowed])
    if missing := [key for key in required if key not in params]:
        refusals.add(where, params, f"{name} needs {', '.join(missing)}")
    try:
        moves = reading.boolean(params.get("cycle_momentum", defaults.get("cycle_momentum", False)))
    except ValueError:
        moves = True
    if moves:
        why = f"unsupported: {name} then moves AdamW's betas in each step (its default); set it to false"
        refusals.add(f"{where}.cycle_momentum", params.get("cycle_momentum"), why)
    given = {key: _argument(key, value, f"{where}.{key}", refusals) for key, value in params.items()}
    given.pop("last_batch_iteration", None)
    found: dict[str, Any] = {"schedule.kind": "deepspeed", "schedule.parameters": given}
    peak, own = given.get("warmup_max_lr"), reading.at(document, "optimizer.params.lr")
    if own is None and isinstance(peak, float) and peak > 0:
        found["optimizer.learning_rate"] = peak
    steps = given.get("total_num_steps")
    return found | ({"training.steps": steps} if isinstance(steps, int) and steps > 0 else {})


def _argument(key: str, value: Any, dotted: str, refusals: reading.Refusals) -> Any:
    """A value as the scheduler takes it: steps are whole, rates numbers; 'auto' is left to the job."""
    if value == reading.AUTO:
        if key not in LEFT_TO_THE_JOB:
            refusals.add(dotted, value, f"only {', '.join(LEFT_TO_THE_JOB)} can be 'auto'")
        return value
    try:
        if key.endswith(("_steps", "_size", "_count")) and value is not None:
            return reading.integer(value)
        if isinstance(value, str) and key != "warmup_type":
            return reading.number(value)
        return float(value) if key.endswith(("_lr", "_ratio")) and type(value) is int else value
    except ValueError as error:
        refusals.add(dotted, value, str(error))
        return value


def _absent(
    document: Mapping[str, Any], defaults: Mapping[str, Any], precision: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """DeepSpeed's defaults of absent keys of the job, by key, in the terms of the job."""
    found: dict[str, Any] = {}
    if not any(reading.at(document, key) is not None for key in PRECISION_KEYS):
        found["bf16.enabled"] = precision
    found["gradient_clipping"] = reading.clipping(defaults["gradient_clipping"])
    batch = [key for key in ("train_batch_size", "train_micro_batch_size_per_gpu") if key in document]
    if len(batch) == 1 and document[batch[0]] != reading.AUTO:
        found["gradient_accumulation_steps"] = 1  # `_set_batch_related_parameters` of its configuration
    if precision == "fp16-mixed":
        found["fp16.initial_scale_power"] = reading.power_of_two(defaults["fp16.initial_scale_power"])
        found |= {f"fp16.{key}": defaults[f"fp16.{key}"] for key in ("loss_scale_window", "hysteresis")}
    if isinstance(optimizer := document.get("optimizer"), dict):
        params = optimizer.get("params") or {}
        name = "torch" if params.get("torch_adam") else "cpu" if "offload" in options else "fused"
        name = "sgd" if optimizer.get("type") == SGD else name
        arguments = reading.library_defaults("deepspeed")["optimizers"][name]["defaults"]
        constants = ("lr", "betas", "eps", "momentum", "weight_decay")
        found |= {f"optimizer.params.{key}": arguments[key] for key in constants if key in arguments}
    if isinstance(scheduler := document.get("scheduler"), dict) and scheduler:
        arguments = reading.library_defaults("deepspeed")["schedulers"][scheduler["type"]]["defaults"]
        found |= {f"scheduler.params.{key}": value for key, value in arguments.items()
                  if key not in ("last_batch_iteration", "last_epoch")}  # fmt: skip
    given = {".".join(parts) for parts, _ in leaves(dict(document))}
    return {key: value for key, value in found.items() if key not in given}


def zero_offload(
    stage: int, device: Mapping[str, str], refusals: reading.Refusals, prefix: str
) -> dict[str, Any]:
    """The option `offload` from the devices of 'offload_optimizer' and 'offload_param'."""
    for name, where in device.items():
        if where not in ("none", "cpu"):
            refusals.add(f"{prefix}{name}", where, NO_FILES if where == "nvme" else "give 'none' or 'cpu'")
            return {}
    optimizer, weights = (device[name] for name in ("offload_optimizer", "offload_param"))
    if (optimizer, weights) not in OFFLOAD_OF:
        why = "weights are offloaded only with the optimizer states, to the same place; offload both, or the "
        refusals.add(f"{prefix}offload_param", weights, f"{why}optimizer alone")
        return {}
    if weights != "none" and stage != 3:
        refusals.add(f"{prefix}offload_param", weights, "weights are offloaded at stage 3 only")
    if optimizer != "none" and stage == 0:
        refusals.add(f"{prefix}offload_optimizer", optimizer, "stage 0 has nothing to offload")
    chosen = OFFLOAD_OF[optimizer, weights]
    return {"offload": chosen} if chosen else {}


def _precision(document: Mapping[str, Any]) -> str:
    """'fp32', 'bf16-mixed', 'fp16-mixed', 'bf16', or AUTO. Raises ValueError for a contradiction."""
    sections = {"bf16": document.get("bf16", document.get("bfloat16", {})), "fp16": document.get("fp16", {})}
    on = {}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise ValueError(f"'{name}' must be a section with 'enabled'")
        given = section.get("enabled", False)
        on[name] = given if given == reading.AUTO else reading.boolean(given)
    if on["bf16"] is True and on["fp16"] is True:
        raise ValueError("only one can be enabled")
    masters, states = (
        reading.alike(sections["bf16"].get(key.partition(".")[2]), True) for key in PURE_BF16_KEYS
    )
    if masters != states and (states or on["bf16"] is True):  # DeepSpeed reads such states with bf16 off too
        raise ValueError("bf16 masters and bf16 optimizer states run only together")
    if on["bf16"] is True:
        return "bf16" if masters else "bf16-mixed"
    if on["fp16"] is True:
        return "fp16-mixed"
    return reading.AUTO if reading.AUTO in on.values() else "fp32"
