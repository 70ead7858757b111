"""What a failure is called where a library's own words do not say what happened, or what to do.

`failure_words.toml` has the words of libraries and the answers; here is what the answers say of the model.
"""

from __future__ import annotations

import re
import shutil
import tomllib
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import nn

from harness.backends.model.blocks import transformer_blocks
from harness.nested import grouped
from harness.rank.live.model_watch import bare_module_name, bare_name
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
    places = grouped(
        (id(module), name)
        for name, module in model.named_modules(remove_duplicate=False)
        if any(True for _ in module.parameters())
    )
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
    names = grouped(
        (id(parameter), name) for name, parameter in model.named_parameters(remove_duplicate=False)
    )
    for of_one in names.values():
        if len({next((block for block in blocks if name.startswith(block)), "") for name in of_one}) > 1:
            yield of_one


Fields = dict[str, str]


def _of(names: Sequence[str]) -> Fields | None:
    return {"names": _named(names)} if names else None


def _expected(text: str) -> Fields:
    """Parameters of the shape that the error names, else all."""
    found = re.search(r"expected shape compatible with \[([\d, ]+)\]", text)
    shape = tuple(map(int, re.findall(r"\d+", found[1]))) if found else None
    names = [name for name, own in _noted.shapes.items() if own and shape in (None, own)]
    return {"names": _named(names or list(_noted.shapes))}


def _sized(text: str) -> Fields:
    sizes = {int(size) for size in re.findall(r"size of tensor \w \((\d+)\)", text)} - {0}
    names = [name for name, shape in _noted.shapes.items() if shape and shape[-1] in sizes]
    return {"of_size": f" (of that size: {_quoted(names)})" if names else ""}


def _several(names: Sequence[str]) -> Fields | None:
    """What stands in several places."""
    if not names:
        return None
    others = {"others": _quoted(names[1:]), "architecture": _noted.architecture}
    return {"first": names[0], "count": str(len(names)), **others}


def _mixed() -> Fields | None:
    ((usual, _),) = Counter(_noted.dtypes.values()).most_common(1) or [("", 0)]
    others = {name: dtype for name, dtype in _noted.dtypes.items() if dtype != usual}
    dtypes = ", ".join(sorted(set(others.values())))
    return {"names": _named(list(others)), "dtypes": dtypes, "usual": usual} if others else None


def _mixed_gradients(error: BaseException) -> Fields:
    """Gradients of mixed dtypes in FSDP2's call that reduces a unit's (torch 2.13: `foreach_reduce`)."""
    dtypes: dict[str, str] = {}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        held = frame.f_locals
        if "fsdp_params" in held and "unsharded_grads" in held:
            pairs = zip(held["fsdp_params"], held["unsharded_grads"], strict=False)
            dtypes |= {bare_name(p._param_fqn or ""): str(g.dtype).removeprefix("torch.") for p, g in pairs}
    low = [name for name, dtype in dtypes.items() if dtype != "float32"]
    others = ", ".join(sorted({dtypes[name] for name in low})) or "of another dtype"
    return {"names": _named(low if len(low) < len(dtypes) else []), "dtypes": others}


def _layer(error: BaseException) -> str:
    """The innermost module of the model in whose forward pass it was raised, of those that hold weights."""
    names = {id(module): name for name, module in _live_modules()}
    within = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [one for one in within if isinstance(one, nn.Module) and id(one) in names]
    layers = [one for one in modules if any(True for _ in one.parameters(recurse=False))]
    return f"module '{names[id(layers[-1])]}'" if layers and names[id(layers[-1])] else "a layer"


def _unused(text: str) -> Fields:
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", text)
    indices = map(int, found[1].split()) if found else ()
    return {"names": _named([_noted.trained[index] for index in indices if index < len(_noted.trained)])}


def _twice(text: str) -> Fields:
    found = re.search(r"with name (\S+)|The parameter (\S+) has already been reduced", text)
    return {"names": _named([found[1] or found[2]] if found else [])}


def _tables() -> Fields | None:
    embeddings = {name: m for name, m in _live_modules() if isinstance(m, nn.Embedding)}
    named = [f"'{name}.weight' of {module.num_embeddings} rows" for name, module in embeddings.items()]
    return {"tables": ", ".join(named[:3])} if named else None


def _live_modules() -> list[tuple[str, nn.Module]]:
    """Modules of the model as it is now, by bare name."""
    model = _noted.live()
    return [(bare_module_name(name), m) for name, m in model.named_modules()] if model is not None else []


_FIELDS: dict[str, Callable[[str, BaseException], Fields | None]] = {
    "scalar": lambda *_: {"names": _named([name for name, shape in _noted.shapes.items() if not shape])},
    "read-outside": lambda text, _: _expected(text),
    "released": lambda text, _: _sized(text),
    "places": lambda *_: _several(next(iter(_noted.places.values()), [])),
    "tied": lambda *_: _several(_noted.tied or ["a parameter"]),
    "tied-under-fsdp1": lambda *_: _several(_noted.tied),
    "mixed": lambda *_: _mixed(),
    "mixed-gradients": lambda _, error: _mixed_gradients(error),
    "wider": lambda _, error: {"layer": _layer(error)},
    "complex": lambda *_: _of([name for name, dtype in _noted.dtypes.items() if dtype.startswith("complex")]),
    "complex-scaled": lambda *given: _FIELDS["complex"](*given),
    "unused": lambda text, _: _unused(text),
    "twice": lambda text, _: _twice(text),
    # Where it trains, the loss hangs on nothing that does.
    "no-gradient": lambda *_: {} if (model := _noted.live()) is not None and not model.training else None,
    "empty": lambda *_: _of([name for name, shape in _noted.shapes.items() if 0 in shape]),
    "beyond-table": lambda *_: _tables(),
    "method": lambda text, _: {"method": text.rpartition(" ")[2]},
    "sparse": lambda *_: {
        "names": _named([f"{name}.weight" for name, m in _live_modules() if getattr(m, "sparse", False)])
    },
    "in-place": lambda text, _: {"operator": next(iter(re.findall(r"aten\.\w+", text)), "DTensor")},
}
"""What an answer says of the model, from the error and its text; None: it does not fit."""


def _named(names: Sequence[str]) -> str:
    return f"parameter {_quoted(names)}" if names else "a parameter"


def _quoted(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(repr(name) for name in names[:3])}{more}"


@cache
def _words() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("failure_words.toml").read_text(encoding="utf-8"))


def _answer(name: str, error: BaseException, backend: str) -> str | None:
    """None: it is of other backends or models."""
    answers = _words()["answers"]
    answer = answers[name]
    if answer.get("backend", "") not in backend:
        return None
    fields = _FIELDS.get(name, lambda *_: {})(described(error), error)
    says: str = answers[answer.get("like", name)]["says"]
    return None if fields is None else says.format(**fields)


OF_STRANGERS = (AttributeError, AssertionError, KeyError)
"""What libraries raise of a parameter that they never saw."""
CUT_SHORT = "inline_container.cc"
"""In the error of `torch.save` that could not write all of a file; it does not say why."""
NO_ROOM_BYTES = 2**16


def failure_message(error: BaseException, run_directory: Path, backend: str) -> str:
    """What to tell of an exception that ends a rank of this backend."""
    text = described(error)
    if isinstance(error, OF_STRANGERS) and (late := _made_late()):
        return f"{_words()['answers']['late']['says'].format(names=_named(late))} ({text})"
    special = None
    if isinstance(error, KeyError) and isinstance(next(iter(error.args), None), int):
        special = _answer("empty", error, backend)  # DeepSpeed numbers the parameters that it holds
    elif isinstance(error, IndexError) and _takes_gradients_itself(error):
        special = _answer("own-gradients", error, backend)
    if special:
        return f"{special} ({type(error).__name__}: {text})"
    for known in _words()["errors"]:
        if any(word in text for word in known["words"]):
            for name in known["answers"]:
                if said := _answer(name, error, backend):
                    return f"{said} ({text})"
    if CUT_SHORT in text and shutil.disk_usage(run_directory).free < NO_ROOM_BYTES:
        return f"No space left on device for what torch.save writes below '{run_directory}' ({text})"
    return text


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
