"""Builds the job's model, equal on every rank, and its adapters, whose initial values no strategy decides."""

from __future__ import annotations

import logging
import math
import warnings
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_map

from harness.backends.libraries.facts import require_installed
from harness.backends.model.blocks import needed_blocks, parameter_count, transformer_blocks
from harness.backends.model.precision import COMPUTE_DTYPES
from harness.backends.refusals import available, suggestion
from harness.errors import JobError
from harness.job.job import ADAPTER_NAME, ALL_LINEAR, IMAGES, AdapterSection, Job, ModelSection
from harness.rank.data import DataFacts, settle_hub
from harness.rank.factories import call_factory, class_in_folder, one_at_a_time, why_refused
from harness.rank.models.changes import chunk_head, compile_blocks, enable_checkpointing
from harness.rank.models.optimizer import freeze
from harness.safe_text import first_line

# peft imports bitsandbytes, which tells of optional kernels for 4-bit weights on CPUs.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

OWN_CLASSES = {
    "causal-lm": ("AutoModelForCausalLM",),
    "seq2seq": ("AutoModelForSeq2SeqLM",),
    "classification": ("AutoModelForImageClassification", "AutoModelForSequenceClassification"),
}
"""What a folder with code of its own may bring for a task."""


def in_fp32() -> dict[str, Any]:
    """Argument by which transformers builds a model in fp32, whatever its configuration says."""
    from packaging.version import Version
    from transformers import __version__

    return {"dtype" if Version(__version__) >= Version("4.56") else "torch_dtype": torch.float32}


def from_config(job: Job, config: Any, **arguments: Any) -> Any:
    """The model that the job's class makes of a configuration. Raises what transformers raises."""
    import transformers

    name = class_for(job, config)
    arguments["trust_remote_code"] = job.model.trust_remote_code
    if class_in_folder(job, config, name) and job.model.revision is not None:
        arguments["code_revision"] = job.model.revision  # by default a hub's main branch gives the code
    with one_at_a_time(job):
        return getattr(transformers, name).from_config(config, **arguments)


def class_for(job: Job, config: Any) -> str:
    """transformers' `AutoModel...` for the job. Raises JobError for a type of model without a head for it."""
    # By name: the public mappings import every model of the library when they are searched.
    from transformers.models.auto import modeling_auto as mappings

    kind = config.model_type
    for own in OWN_CLASSES.get(job.task, ()):
        if class_in_folder(job, config, own):
            return own
    classes, problem = {
        "causal-lm": (
            {"AutoModelForCausalLM": mappings.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES},
            "is not a causal language model; choose one such as llama, gpt2, bloom, qwen2 or mistral, or "
            "another task",
        ),
        "seq2seq": (
            {"AutoModelForSeq2SeqLM": mappings.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES},
            "has no encoder and decoder for task seq2seq; choose one such as t5, bart or marian",
        ),
        "classification": (
            {
                f"AutoModelFor{what}Classification": getattr(
                    mappings, f"MODEL_FOR_{what.upper()}_CLASSIFICATION_MAPPING_NAMES"
                )
                for what in ("Image", "Sequence")
            },
            "has no head for task classification; choose one such as bert, distilbert, vit or resnet",
        ),
        "custom": ({"AutoModel": [kind]}, ""),
    }[job.task]
    # BERT and its kin have a causal head, but attend to both sides unless they are made decoders.
    masked = kind in mappings.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    is_other = job.task == "causal-lm" and (masked or getattr(config, "is_encoder_decoder", False))
    found = None if is_other else next((name for name, kinds in classes.items() if kind in kinds), None)
    if found is None:
        raise JobError(f"model '{job.model.name or kind}' ({kind}) {problem}")
    return found


def build_own_model(job: Job, *, weights: bool = True) -> nn.Module:
    """Call `model.factory` with torch's generator at the job's seed: the model in fp32 on the CPU.

    weights: False where the parameters that modules register have no memory (`initial_weights`). Raises
    JobError for what is no module with parameters.
    """
    assert job.model.factory is not None
    torch.manual_seed(job.training.seed)
    model = call_factory("model.factory", job.model.factory, job.model.arguments)
    shown = f"model.factory '{job.model.factory}'"
    if not isinstance(model, nn.Module):
        raise JobError(f"{shown} returned a {type(model).__name__}; it must return a torch.nn.Module")
    if next(model.parameters(), None) is None:
        raise JobError(f"{shown} returned a {type(model).__name__} without parameters; nothing can train")
    lazy = [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise JobError(
            f"{shown}: parameter '{lazy[0]}' takes its shape from the first batch, and strategies cut "
            "weights before that; give its layer all sizes, or pass a batch through it in the factory"
        )
    wide = [name for name, parameter in model.named_parameters() if parameter.dtype == torch.float64]
    if wide:
        raise JobError(
            f"{shown}: parameter '{wide[0]}' is float64, which no strategy is compared in: they train in "
            "fp32, bf16 or fp16 (training.precision); return model.float()"
        )
    if weights and not torch.empty(0).is_meta:  # else modules are being built without memory
        if any(parameter.is_meta for parameter in model.parameters()):
            raise JobError(f"{shown} returned parameters on the meta device; give them values on the CPU")
        model.to(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():  # complex ones would lose their imaginary part
            tensor.data = tensor.data.to(torch.float32)
    for parameter in model.parameters():
        if not parameter.is_contiguous():  # no library cuts or flattens others
            parameter.data = parameter.data.contiguous()
    if (dropout := job.model.dropout) is not None:
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = dropout
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = dropout
    return model


def declare_blocks(model: nn.Module, section: ModelSection) -> None:
    """Name the classes of a model's blocks in `_no_split_modules`, where Accelerate and Trainer look, too.

    Those that `model.block_class` gives; else what the model declares and has; else the class that its
    largest list of equal modules repeats, or none. Raises JobError for a class that the model has not.
    """
    if section.block_classes:
        have = dict.fromkeys(type(module).__name__ for module in model.modules())
        missing = [name for name in section.block_classes if name not in have]
        if missing:
            raise JobError(
                f"model.block_class: {type(model).__name__} has no module of class {missing[0]}; it has "
                f"{', '.join(have)}"
            )
        model._no_split_modules = list(section.block_classes)  # type: ignore[assignment]
    elif not transformer_blocks(model):
        sizes: Counter[str] = Counter()  # by class of their members, parameters of lists of two or more alike
        for module in model.modules():
            kinds = {type(member) for member in module.children()}
            lists = isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1 and len(kinds) == 1
            # A list of lists is no list of blocks: nothing calls its members.
            if lists and not issubclass(next(iter(kinds)), nn.ModuleList | nn.ModuleDict):
                sizes[kinds.pop().__name__] += parameter_count(module)
        model._no_split_modules = [name for name, _ in sizes.most_common(1)]  # type: ignore[assignment]


if TYPE_CHECKING:
    from transformers import PretrainedConfig

PACKAGE = "bitsandbytes"


def quantise(model: nn.Module, compute: torch.dtype) -> None:
    """Replace the linear layers of a model's blocks, in place; they compute in `compute`.

    Every rank quantises the same weights, so all hold the same bytes. A weight becomes uint8, two values in
    a byte; its scales, one for 64 values, are no parameters. Raises Unsupported without bitsandbytes.
    """
    require_installed(PACKAGE, "adapter.base_dtype=nf4", "'sharding-harness[qlora]'")
    from bitsandbytes import nn as layers

    for block in needed_blocks(model).values():
        for name, module in list(block.named_modules()):
            if type(module) is nn.Linear:
                parent, _, own = name.rpartition(".")
                setattr(block.get_submodule(parent), own, _quantised(layers, module, compute))
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # where peft looks for it


def _quantised(layers: Any, linear: nn.Linear, compute: torch.dtype) -> nn.Module:
    layer: nn.Module = layers.Linear4bit(
        linear.in_features, linear.out_features, bias=linear.bias is not None, compute_dtype=compute,
        quant_type="nf4",
    )  # fmt: skip
    layer.weight = layers.Params4bit(
        linear.weight.detach().clone(), requires_grad=False, quant_type="nf4", module=layer
    )
    if linear.bias is not None:
        layer.bias = linear.bias
    # bitsandbytes 0.50 packs weights anew, in place, in an evaluation on the CPU: their digest would change.
    layer.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    return layer.to(linear.weight.device)  # quantises


def model_config(job: Job, facts: DataFacts) -> PretrainedConfig | None:
    """The Hugging Face configuration of the job's model, checked against data and task.

    None: the model is of the user's own. Raises JobError: unknown type or key, a model that cannot do the
    task, context or vocabulary too small, images of another size.
    """
    if job.model.factory is not None:
        return None
    config = _named_config(job, facts) if job.model.name else _given_config(job, facts)
    class_for(job, config)  # checks the task
    if job.model.dropout is not None:
        set_dropout(config, job.model.dropout)
    context = getattr(config, "max_position_embeddings", None)
    is_text = facts.vocabulary_size is not None
    if is_text and isinstance(context, int) and job.data.sequence_length > context:
        raise JobError(
            f"data.sequence_length {job.data.sequence_length} is longer than the model's context of "
            f"{context} positions; shorten it or choose a model with a longer context"
        )
    known = getattr(config, "vocab_size", None)
    if facts.vocabulary_size is not None and known is not None and facts.vocabulary_size > known:
        raise JobError(
            f"the tokenizer has {facts.vocabulary_size} ids but the model's vocab_size is "
            f"{known}; raise model.config.vocab_size or change data.tokenizer"
        )
    if (
        job.task == "classification"
        and facts.classes is not None
        and facts.classes > (config.num_labels or 0)
    ):
        raise JobError(
            f"the data has {facts.classes} classes but the model's num_labels is {config.num_labels}; "
            "raise model.config.num_labels"
        )
    return config


def facts_in(config: Any) -> DataFacts:
    """Facts of which `model_config` makes this configuration again."""
    return DataFacts(
        vocabulary_size=getattr(config, "vocab_size", None),
        classes=config.num_labels,
        padding=getattr(config, "pad_token_id", None),
    )


def build_model(job: Job, config: PretrainedConfig | None) -> nn.Module:
    """The whole model on the CPU: fp32, or bf16 for precision 'bf16'.

    At a mixed precision the initial weights are rounded to the compute dtype: DeepSpeed copies its fp32
    masters from low-precision weights, and every backend must start from the same numbers.
    """
    model = draw_model(job, config)
    if job.adapter.is_quantised:
        quantise(model, COMPUTE_DTYPES[job.training.held_precision])
    add_adapters(job, model)
    finish_model(job, model)
    return model


def draw_model(job: Job, config: PretrainedConfig | None, *, pretrained: bool = True) -> nn.Module:
    """The model in fp32 as the library makes it: random weights from the seed, or those of a checkpoint.

    `pretrained`: False leaves a checkpoint's weights unread, and those of `model.factory` without memory.
    """
    if config is None:
        return build_own_model(job, weights=pretrained)
    import transformers
    from safetensors import SafetensorError

    arguments: dict[str, Any] = {"attn_implementation": job.model.attention_kernel, **in_fp32()}
    torch.manual_seed(job.training.seed)
    try:
        if pretrained and job.model.name is not None and job.model.reads_checkpoint:
            with one_at_a_time(job):
                return getattr(transformers, class_for(job, config)).from_pretrained(
                    job.model.name, config=config, revision=job.model.revision,
                    trust_remote_code=job.model.trust_remote_code, **arguments,
                )  # fmt: skip
        return from_config(job, config, **arguments)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        name = job.model.name or config.model_type
        raise JobError(why_refused(name, error) or f"model '{name}': {_first_line(error)}") from error


def finish_model(job: Job, model: nn.Module) -> None:
    """Put the job's blocks, precision and checkpointing on a model as the library made it."""
    declare_blocks(model, job.model)
    if job.training.activation_checkpointing:
        enable_checkpointing(model, job.training.activation_checkpointing)
    compute = COMPUTE_DTYPES[job.training.held_precision]
    if compute is not torch.float32:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point():
                    parameter.copy_(parameter.to(compute).float())
    if job.training.precision == "bf16":
        nn.Module.to(model, torch.bfloat16)
    hold_frozen(job, model)
    if job.task in ("classification", "custom") or job.model.factory is not None:
        model.register_forward_pre_hook(_narrow_inputs, with_kwargs=True)
    if job.loss.chunk_tokens is not None:
        chunk_head(model, job.loss.chunk_tokens)
    if job.model.compile == "block":
        compile_blocks(model)
    model.train()


def _narrow_inputs(model: nn.Module, inputs: Any, keywords: Any) -> Any:
    """Cast fp32 inputs to the dtype of 16-bit weights, as `Trainer._prepare_input` does for DeepSpeed.

    Where weights are fp32 autocast or FSDP casts them.
    """
    weights = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if weights.itemsize >= torch.float32.itemsize:
        return None

    def narrowed(value: Any) -> Any:
        is_wide = isinstance(value, torch.Tensor) and value.dtype is torch.float32
        return value.to(weights) if is_wide else value

    return tree_map(narrowed, (inputs, keywords))


def _given_config(job: Job, facts: DataFacts) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING

    values = job.model.config_values()
    model_type = values.pop("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise JobError(
            f"model.config.model_type '{model_type}' is unknown to transformers. "
            f"{suggestion(str(model_type), list(CONFIG_MAPPING.keys()), most=3) or 'See its list of models'}"
        )
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    class_for(job, default)  # checks the task
    known = set(default.to_dict()) | set(getattr(config_class, "attribute_map", {})) | {"num_labels"}
    of_data = {
        "vocab_size": facts.vocabulary_size,
        "image_size": job.data.image_size if job.data.source in IMAGES else None,
        "num_labels": facts.classes if job.task == "classification" else None,
        "pad_token_id": facts.padding if job.task == "classification" else None,
    }
    values = {key: value for key, value in of_data.items() if key in known and value is not None} | values
    for key in values:
        if key not in known:
            raise JobError(
                f"model.config.{key} is not a setting of {model_type}. "
                f"{available(key, sorted(known), 'Allowed')}"
            )
    try:
        return config_class(**values)
    except Exception as error:  # huggingface_hub's strict dataclasses raise their own hierarchy
        if not isinstance(error, (ValueError, TypeError)) and "Validation" not in type(error).__name__:
            raise
        raise JobError(f"model.config is refused by {model_type}: {_first_line(error)}") from error


def _named_config(job: Job, facts: DataFacts) -> PretrainedConfig:
    from transformers import AutoConfig

    model = job.model
    assert model.name is not None
    settle_hub(model.name)
    # A checkpoint has the classes of the data that it was trained on; those of the job make a new head.
    given = {"num_labels": facts.classes} if job.task == "classification" and facts.classes else {}
    try:
        with one_at_a_time(job):
            return AutoConfig.from_pretrained(
                model.name, revision=model.revision, trust_remote_code=model.trust_remote_code, **given
            )
    except (OSError, ValueError, KeyError) as error:
        raise JobError(
            why_refused(model.name, error)
            or f"model.name '{model.name}' cannot be loaded: {_first_line(error)} "
            "Give a local folder, or a hub name this machine can reach"
        ) from error


def set_dropout(config: PretrainedConfig, probability: float) -> None:
    """Write the probability to every dropout of a configuration."""
    for key, value in config.to_dict().items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if "dropout" in key or key.endswith("pdrop"):
                setattr(config, key, probability)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    line = lines[0] if lines else repr(error)
    if line.endswith(":") and len(lines) > 1:
        line = f"{line} {lines[1]}"
    return line if line.endswith((".", "?", "!")) else line + "."


_A, _B = f".lora_A.{ADAPTER_NAME}.weight", f".lora_B.{ADAPTER_NAME}.weight"
_BASE = ".base_layer."
BASE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def add_adapters(job: Job, model: nn.Module) -> None:
    """Replace the targeted layers of a model by peft's and freeze everything else, in place; freeze what the
    optimizer's groups freeze, with or without adapters.

    Of a model on the meta device the adapters are there too; otherwise they get their initial values. The
    model keeps its class, and the names of parameters outside of adapted layers. Raises JobError for targets
    that the model does not have or that peft cannot adapt.
    """
    if job.adapter.is_present:
        _inject(job, model)
    freeze(model, job.optimizer)


def _inject(job: Job, model: nn.Module) -> None:
    from peft import inject_adapter_in_model

    try:
        with warnings.catch_warnings():
            # peft tells that it sets fan_in_fan_out for GPT-2's Conv1D.
            warnings.filterwarnings("ignore", message="fan_in_fan_out")
            inject_adapter_in_model(peft_config(job.adapter), model, ADAPTER_NAME, low_cpu_mem_usage=True)
    # ValueError: no module of that name, or a layer without LoRA. The others: dtypes and methods that peft's
    # layers lack (tuners/tuners_utils.py, tuners/lora/layer.py).
    except (ValueError, NotImplementedError, TypeError) as error:
        raise JobError(f"adapter.targets: {first_line(error)}") from error
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not is_adapter(name):
            raise JobError(f"adapter.targets: peft makes '{name}' there; name linear layers only")
    on_meta = next(p for n, p in model.named_parameters() if not is_adapter(n)).is_meta
    if on_meta:
        return
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(initial_values(name, parameter.shape, job.training.seed))


def peft_config(adapter: AdapterSection) -> Any:
    from peft import LoraConfig

    targets: Any = adapter.targets
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # type: ignore[arg-type]
        lora_dropout=adapter.dropout,
        target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else targets,
        bias="none",
    )


def is_adapter(name: str) -> bool:
    return name.endswith((_A, _B))


def bare_name(name: str) -> str:
    """The name that a frozen parameter has in the model without adapters."""
    return name.replace(_BASE, ".")


def initial_values(name: str, shape: torch.Size, seed: int) -> Tensor:
    """Initial values of an adapter's parameter, fp32: A as peft draws it, B of zeros.

    Uniform within 1 / sqrt(fan in) (peft 0.21, `LoraLayer.reset_lora_parameters`), from a generator that the
    job's seed and the name set, so that they depend neither on the strategy nor on the order of building.
    """
    if name.endswith(_B):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode(), seed & 0xFFFFFFFF))
    values = torch.empty(shape)
    nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    return values


def hold_frozen(job: Job, model: nn.Module) -> None:
    """Cast frozen weights to the dtype that the job names, in place; buffers stay."""
    if job.adapter.base_dtype is None or job.adapter.is_quantised:
        return
    dtype = BASE_DTYPES[job.adapter.base_dtype]
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
