"""What a failure is called where a library's own words do not say what happened, or what to do."""

from __future__ import annotations

import re
import shutil
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from harness.backends.model.blocks import transformer_blocks
from harness.rank.live.model_watch import bare_name
from harness.rank.live.observer import NO_GRADIENT
from harness.safe_text import described


@dataclass(frozen=True, kw_only=True)
class _Model:
    """What libraries' errors do not tell of the model, as it was before one of them touched it."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    places: dict[str, list[str]] = field(default_factory=dict)
    """Of each module with parameters of its own or below that stands in several places, all of them."""
    tied: list[str] = field(default_factory=list)
    """Names of a parameter that lies in several wrap units, of the first such parameter."""
    architecture: str = ""
    live: Callable[[], nn.Module | None] = lambda: None
    """The model as it is now; None: it is gone."""


_noted = _Model()


def note_parameters(model: nn.Module) -> None:
    """Note names, whole shapes, dtypes and modules that stand in several places."""
    global _noted
    places: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if any(True for _ in module.parameters()):
            places.setdefault(id(module), []).append(name)
    several = [names for names in places.values() if len(names) > 1]
    outer = [names for names in several if names[0].rpartition(".")[0] not in {n for o in several for n in o}]
    named = dict(model.named_parameters())
    _noted = _Model(
        shapes={name: tuple(parameter.shape) for name, parameter in named.items()},
        dtypes={name: str(parameter.dtype).removeprefix("torch.") for name, parameter in named.items()},
        trained=[name for name, parameter in named.items() if parameter.requires_grad],
        places={names[0]: names for names in outer},
        tied=next(_in_several_units(model), []),
        architecture=type(model).__name__,
        live=weakref.ref(model),
    )


def _in_several_units(model: nn.Module) -> Iterator[list[str]]:
    """Names of each parameter that modules of several wrap units hold."""
    blocks = tuple(f"{name}." for name in transformer_blocks(model))
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for of_one in names.values():
        if len({next((block for block in blocks if name.startswith(block)), "") for name in of_one}) > 1:
            yield of_one


def _scalar(_text: str, _backend: str) -> str:
    names = [name for name, shape in _noted.shapes.items() if not shape]
    return (
        f"{_named(names)} has no dimension, which this backend cannot cut or send; give it shape (1,), as "
        "torch.ones(1), or run ddp"
    )


EXPECTED_SHAPE = re.compile(r"expected shape compatible with \[([\d, ]+)\]")


def _read_outside(text: str, _backend: str) -> str:
    found = EXPECTED_SHAPE.search(text)
    shape = tuple(map(int, re.findall(r"\d+", found[1]))) if found else None
    names = [name for name, own in _noted.shapes.items() if own and shape in (None, own)]
    read = _named(names or list(_noted.shapes))
    return (
        f"the loss, or code outside of the model's forward pass, reads {read}, of which a rank holds a part "
        "there; compute that in forward and return it, use optimizer.weight_decay for an L2 penalty, or run "
        "ddp, zero1 or zero2"
    )


OTHER_SIZE = re.compile(r"size of tensor \w \((\d+)\)")


def _released(text: str, backend: str) -> str:
    if "zero3" not in backend:
        return ""
    sizes = {int(size) for size in OTHER_SIZE.findall(text)} - {0}
    names = [name for name, shape in _noted.shapes.items() if shape and shape[-1] in sizes]
    which = f" (of that size: {_quoted(names)})" if names else ""
    return (
        f"a weight{which} is read outside of the module that holds it, where ZeRO-3 has given it back and "
        "it is empty; call that module, gather the weight there (deepspeed.zero.GatheredParameters), or run "
        "ddp, zero1 or zero2"
    )


def _flat(text: str, backend: str) -> str:
    if "fsdp1" not in backend:
        return _released(text, backend)
    if _noted.places:
        first, names = next(iter(_noted.places.items()))
        return (
            f"module '{first}' stands in the model {len(names)} times (also as {_quoted(names[1:])}), and "
            "FSDP1 gathers its weights at the first place alone; give each place a module of its own, or run "
            "fsdp, ddp or a ZeRO backend"
        )
    if _noted.tied:
        return _across_units("", backend)
    return (
        "a weight is read outside of the module that holds it, where FSDP1 has a flat part of it; call that "
        "module instead, or run ddp, zero1 or zero2"
    )


def _across_units(_text: str, _backend: str) -> str:
    first, *others = _noted.tied or ["a parameter"]
    return (
        f"parameter '{first}' is tied to {_quoted(others)} in another wrap unit, and FSDP gathers it with "
        f"one of them; set model.block_class={_noted.architecture}, which makes the model one unit, or run "
        "ddp or a ZeRO backend"
    )


def _mixed(_text: str, _backend: str) -> str:
    ((usual, _),) = Counter(_noted.dtypes.values()).most_common(1) or [("", 0)]
    others = [name for name, dtype in _noted.dtypes.items() if dtype != usual]
    if not others:
        return ""
    kinds = ", ".join(sorted({_noted.dtypes[name] for name in others}))
    return (
        f"{_named(others)} is {kinds}, the others {usual}, and FSDP cuts one dtype per unit; build the model "
        "in one dtype (model.float()), or run ddp or a ZeRO backend"
    )


def _complex(_text: str, _backend: str) -> str:
    names = [name for name, dtype in _noted.dtypes.items() if dtype.startswith("complex")]
    if not names:
        return ""
    return (
        f"{_named(names)} is complex, which FSDP and ZeRO cannot hold together with real ones; keep it as "
        "real numbers with a last dimension of 2 and view it in forward (torch.view_as_complex), or run ddp"
    )


def _unused(text: str, _backend: str) -> str:
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
    indices = map(int, found[1].split()) if found else ()
    names = [_noted.trained[index] for index in indices if index < len(_noted.trained)]
    return (
        f"no gradient reaches {_named(names)} in some step, which DDP waits for; have the loss use it, "
        "freeze it (requires_grad_(False)), or run ddp:find_unused_parameters=true, or where no rank uses it "
        "fsdp or a ZeRO backend"
    )


def _twice(text: str, _backend: str) -> str:
    found = re.search(r"with name (\S+)|The parameter (\S+) has already been reduced", text)
    names = [found[1] or found[2]] if found else []
    return (
        f"{_named(names)} takes part in several backward passes of one step, as under "
        "reentrant checkpointing of a shared module; use checkpoint(..., use_reentrant=False), or run fsdp"
    )


def _no_gradient(_text: str, _backend: str) -> str:
    if (model := _noted.live()) is None or model.training:
        return ""  # of a loss that hangs on nothing that trains
    return (
        "the loss takes a gradient (torch.autograd.grad) of what has none; in evaluation nothing has one: "
        "take it where torch.is_grad_enabled(), or leave evaluation.every_steps out"
    )


def _written_to(_text: str, backend: str) -> str:
    if "fsdp1" not in backend:
        return ""
    return (
        "the forward pass writes to a weight, as to the moving average of a teacher, and FSDP1 has weights "
        "as views of a flat one; write to it after the step, or run ddp, zero2 or fsdp"
    )


def _empty(_text: str, _backend: str) -> str:
    names = [name for name, shape in _noted.shapes.items() if 0 in shape]
    return f"{_named(names)} has no element to cut; leave it out, or run ddp" if names else ""


def _beyond_table(_text: str, _backend: str) -> str:
    model = _noted.live()
    modules = model.named_modules() if model is not None else ()
    tables = {bare_name(f"{name}.weight"): m for name, m in modules if isinstance(m, nn.Embedding)}
    named = [f"'{name}' of {module.num_embeddings} rows" for name, module in tables.items()]
    if not named:
        return ""
    return (
        f"a sample has a number beyond an embedding: {', '.join(named[:3])}; a tokenizer with added tokens "
        "needs more rows (model.resize_token_embeddings), and so does a sequence longer than its positions"
    )


def _method(text: str, _backend: str) -> str:
    return (
        f"the loss asks DDP's wrapper for {text.rpartition(' ')[2]}, which is the model's own; "
        "call the model itself (forward), whose hooks reduce gradients, or run a ZeRO backend"
    )


def _sparse(_text: str, _backend: str) -> str:
    model = _noted.live()
    modules = model.named_modules() if model is not None else ()
    names = [f"{bare_name(name)}.weight" for name, module in modules if getattr(module, "sparse", False)]
    return (
        f"the gradient of {_named(names)} is sparse, which no backend can add up; build it with sparse=False"
    )


def _in_place(text: str, _backend: str) -> str:
    found = re.search(r"(aten\.\w+)", text)
    return (
        "code of the job, such as its optimizer, changes a norm over ranks in place "
        f"({found[1] if found else 'DTensor'}), which torch does not support; write that operation out of "
        "place, or run ddp"
    )


WIDER = (
    "the forward pass gives a layer another dtype than its weights have, as after .float() or where it "
    "makes a tensor of its own; cast it to the weight's dtype (x.to(layer.weight.dtype)), or run ddp, "
    "whose autocast does"
)
KNOWN: dict[tuple[str, ...], str | Callable[[str, str], str]] = {
    ("support scalar parameters", "self.dim() cannot be 0 to view"): _scalar,
    ("got mixed torch.Tensor and DTensor", "got [0] but expected shape compatible with"): _read_outside,
    ("must be a matrix, got 1-D tensor", "'weight' must be 2-D", "same shape as normalized_shape"): _flat,
    ("mat1 and mat2 must have the same dtype",): lambda text, backend: (
        (_noted.places and _flat(text, backend)) or WIDER
    ),
    ("expect parameter to have scalar type of",): WIDER,
    ("must match the size of tensor b (0)", "The size of tensor a (0)"): _released,
    ("backward through the graph a second time",): (
        "the loss uses the graph of an earlier step, which the backward pass has freed, as where a state or "
        "a loss is kept from step to step; detach what is kept (.detach())"
    ),
    (
        "Recomputed values for the following",
        "during the original forward and recomputation",
    ): (
        "a block computed something else when activation checkpointing ran it again, as with a counter, a "
        "cache or a random choice that torch does not restore; have it depend on its inputs "
        "alone, or leave it out"
    ),
    ("index out of range in self",): _beyond_table,
    ("Expected more than 1 value per channel when training",): (
        "a normalisation over the batch got one sample: a rank's micro-batch is too small for it; use fewer "
        "ranks or micro-steps (training.micro_batch_size), SyncBatchNorm, or GroupNorm"
    ),
    ("ComplexFloat", "torch.complex"): _complex,
    ("uniform dtype", "uniform original parameter dtype"): _mixed,
    ("Expected to have finished reduction in the prior iteration",): _unused,
    ("Expected to mark a variable ready only once", "Gradient computed twice"): _twice,
    ("is shared with a parameter already managed by another FSDP group",): _across_units,
    ("in-place operations that require placement changes",): _in_place,
    ("out of bounds for storage of size 0", "but its data is not allocated yet"): (
        "a weight is used after its unit has given its memory back: by a gradient of a gradient "
        "(create_graph=True) or by code outside of the model's forward pass; leave that out, or run it there"
    ),
    ("does not have a deterministic implementation",): (
        "set training.deterministic=false: an operator has no deterministic kernel on CUDA, and repeats of a "
        "run will differ by rounding"
    ),
    (NO_GRADIENT,): _no_gradient,
    ("for sparse tensors", "'SparseCPU' backend", "dense and sparse Tensors"): _sparse,
    ("'DistributedDataParallel' object has no attribute",): _method,
    ("_chunk_cat expects non-empty tensor", "no attribute '_hp_mapping'"): _empty,
    ("another view of its base has been modified inplace",): _written_to,
    ("'Tensor' object has no attribute 'ds_status'",): (
        "a tensor replaces a weight, as under torch.func.functional_call, and ZeRO-3 gathers its "
        "own only; call the module itself, or run ddp, zero2 or fsdp"
    ),
    ("'NoneType' object is not callable",): lambda _, backend: (
        "something that returns nothing is called; eval() and train() of a DeepSpeed engine return "
        "nothing, so model.eval()(x) fails: call model.eval() on a line of its own"
        if "zero" in backend
        else ""
    ),
}
"""What to say of an error whose text has one of these words; a function is given the text and the backend."""
OF_STRANGERS = (AttributeError, AssertionError, KeyError)
"""What libraries raise of a parameter that they never saw."""
CUT_SHORT = "inline_container.cc"
"""In the error of `torch.save` that could not write all of a file; it does not say why."""
NO_ROOM_BYTES = 2**16


OWN_GRADIENTS = (
    "the loss takes gradients itself (torch.autograd.grad, as a penalty on them does), which ZeRO's hooks "
    "take for those of a backward pass and have no place for; run ddp"
)


def _takes_gradients_itself(error: BaseException) -> bool:
    """Whether DeepSpeed's hooks failed within a call of `torch.autograd.grad`."""
    frames = traceback.extract_tb(error.__traceback__)
    within = [frame.name for frame in frames if frame.filename.endswith("torch/autograd/__init__.py")]
    return "grad" in within and "/deepspeed/" in frames[-1].filename


def _made_late() -> list[str]:
    """Parameters that the model has by now and had not when it was built."""
    model = _noted.live()
    names = [bare_name(name) for name, _ in model.named_parameters()] if model is not None else []
    return [name for name in names if name not in _noted.shapes and "_flat_param" not in name]


def _named(names: Sequence[str]) -> str:
    return f"parameter {_quoted(names)}" if names else "a parameter"


def _quoted(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(repr(name) for name in names[:3])}{more}"


def failure_message(error: BaseException, run_directory: Path, backend: str) -> str:
    """What to tell of an exception that ends a rank of this backend."""
    text = described(error)
    if isinstance(error, OF_STRANGERS) and (late := _made_late()):
        return (
            f"{_named(late)} is made after the strategy took the model's parameters, so that it is neither "
            f"sharded nor trained; make it in the model's constructor ({text})"
        )
    if isinstance(error, KeyError) and isinstance(next(iter(error.args), None), int):
        if said := _empty(text, backend):  # DeepSpeed numbers the parameters that it holds
            return f"{said} ({type(error).__name__}: {text})"
    if isinstance(error, IndexError) and _takes_gradients_itself(error):
        return f"{OWN_GRADIENTS} ({type(error).__name__}: {text})"
    for words, known in KNOWN.items():
        if any(word in text for word in words):
            if said := known if isinstance(known, str) else known(text, backend):
                return f"{said} ({text})"
    if CUT_SHORT in text and shutil.disk_usage(run_directory).free < NO_ROOM_BYTES:
        return f"No space left on device for what torch.save writes below '{run_directory}' ({text})"
    return text
