"""Finds the model that a person names: in the catalogue, in a folder or in a file. No weights, no hub."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from harness.backends.refusals import suggestion
from harness.backends.yaml_values import parse_value
from harness.errors import HarnessError
from harness.files import read_settings
from harness.job.config import load_experiment
from harness.launch.launcher import require_libraries
from harness.nested import mapping
from harness.plan import architectures
from harness.plan.catalogue import read_entries
from harness.plan.model import PlannedModel
from harness.tell.formats import gigabytes

MIXTURE = "mixture of experts"
COVERED = f"of mixtures, types {' and '.join(architectures.MIXTURES)} are covered"
UNLIKE_SHARE = 0.05
"""Of the states of another strategy, from which a difference is explained."""


def why_uneven(held_bytes: Mapping[str, int], config: Mapping[str, Any]) -> str | None:
    """Why fsdp holds more than zero3 on as many ranks; None: it does not. held_bytes: of states, by label."""
    fsdp, zero3 = held_bytes.get("fsdp", 0), held_bytes.get("zero3", 0)
    if not zero3 or fsdp <= (1 + UNLIKE_SHARE) * zero3:
        return None
    experts = next(config[key] for key in architectures.EXPERTS if config.get(key))
    return (
        f"fsdp holds {gigabytes(fsdp)} GB of states and zero3 {gigabytes(zero3)}: FSDP2 cuts the experts of "
        f"a layer, one tensor, by their number, so no more than {experts} ranks share them; ZeRO-3 and FSDP1 "
        "cut flat tensors"
    )


FOLDER = "models"
NOT_COVERED = "reason"
"""Key of an entry that says why no closed form covers the model."""


def load_model(text: str, *, by_known_type: bool = True, assignments: Sequence[str] = ()) -> PlannedModel:
    """The model that `--model` names: catalogue entry, folder with config.json, or configuration file.

    by_known_type: one that brings its own code is that of transformers with the same tensors, as in the
    catalogue. assignments: of `--set`; those of `model.config` change the model, as they do that of a run.
    Raises HarnessError: unknown, not covered, unreadable, or without a value that decides shapes.
    """
    config, name, source = _named(text, by_known_type=by_known_type)
    own = [given for given in assignments if given.partition("=")[0].split(".")[:2] == ["model", "config"]]
    if own:
        whole = f"model.config={json.dumps(config, default=str)}"
        config = load_experiment(None, (whole, *own)).model.config_values()
        source = ", ".join([source, *own])
    return from_config(config, name=name, source=source, given_whole=not own)


def _named(text: str, *, by_known_type: bool) -> tuple[dict[str, Any], str, str]:
    """Configuration, name and source."""
    path = Path(text)
    if path.is_dir():
        file = path / "config.json"
        if not file.is_file():
            raise HarnessError(
                f"--model {text}: the folder has no config.json; give a model's folder, or its name"
            )
    elif path.is_file():
        file = path
    else:
        name, entry = find_entry(text)
        if NOT_COVERED in entry:
            reason = f"{entry[NOT_COVERED]}; {COVERED}, or choose a dense model"
            raise HarnessError(f"{name} is not covered: {reason}")
        return dict(entry["config"]), name, f"catalogue: {entry.get('hub') or name}"
    config, source = dict(_read(file)), str(file)
    if by_known_type and (known := architectures.as_known_type(config)) is not None:
        source += f", {config['model_type']} with the code of {known['model_type']} in transformers"
        config = dict(known)
    return config, path.resolve().name if path.is_dir() else path.stem, source


def model_settings(text: str) -> tuple[str, ...]:
    """Assignments for `--set` that make a job of the same model with random weights; no hub is needed.

    What a job says of where its own model comes from goes with that model.
    """
    path = Path(text)
    own = ("factory=null", "arguments={}", "revision=null", "trust_remote_code=false", "block_class=null")
    file = path / "config.json"
    if path.is_dir() and not (file.is_file() and architectures.as_known_type(_read(file))):
        found = ("config=null", f"name={text}", "weights=random")
    else:
        config = load_model(text).config if path.exists() else find_entry(text)[1]["config"]
        found = ("name=null", "weights=null", f"config={json.dumps(config, default=str)}")
    return tuple(f"model.{assignment}" for assignment in (*own, *found))


def catalogue_names() -> list[str]:
    """Names of the models that the catalogue covers."""
    return [name for name, entry in read_entries(FOLDER).items() if NOT_COVERED not in entry]


def catalogue_lines() -> list[str]:
    """The catalogue as a table: name, hub id, published parameters."""
    rows = [[name, entry.get("hub") or "", _published(entry)] for name, entry in read_entries(FOLDER).items()]
    headers = ["name", "hub", "parameters"]
    return tabulate(rows, headers=headers, tablefmt="plain", disable_numparse=True).splitlines()


def _published(entry: Mapping[str, Any]) -> str:
    if NOT_COVERED in entry:
        return f"not covered: {entry[NOT_COVERED]}"
    count = entry["published"]
    return f"{count:,}" if isinstance(count, int) else str(count)


def from_config(
    config: Mapping[str, Any], *, name: str, source: str, given_whole: bool = True
) -> PlannedModel:
    """A model from values of its Hugging Face configuration.

    Types without a closed form are built on the meta device, which imports torch. given_whole: values that
    decide shapes must be given; otherwise transformers' defaults hold, as in a job's `model.config`.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise HarnessError(f"{source} lacks 'model_type', such as llama; give a Hugging Face config.json")
    architecture = architectures.ARCHITECTURES.get(model_type)
    if architecture is None:
        if architectures.mixture_of_experts(config):
            raise HarnessError(f"{name} is not covered: {MIXTURE} of type {model_type}; {COVERED}")
        require_libraries(f"models of a type without a closed form, such as {name},")
        from harness.rank.job_check import describe_on_meta  # loads torch and transformers

        return PlannedModel(name=name, source=source, **describe_on_meta(config, source))
    return planned(
        architecture, architecture.values(config, given_whole=given_whole, where=source), name, source
    )


def planned(
    architecture: architectures.Architecture, values: Mapping[str, Any], name: str, source: str
) -> PlannedModel:
    """Build the tensors of an architecture in closed form."""
    tensors = architecture.build(values)
    names = {new: old for old, new in architecture.aliases.items()}
    config = {**values, **{names[key]: value for key, value in values.items() if key in names}}
    heads = config["num_attention_heads"]
    return PlannedModel(
        name=name,
        source=source,
        architecture=architecture.class_name,
        config=config,
        layout=tensors.layout(),
        multiplying_parameters=tensors.multiplying,
        idle_parameters=tensors.idle,
        layers=config["num_hidden_layers"],
        attention_width=heads * architectures.head_size(config),
    )


def find_entry(text: str) -> tuple[str, dict[str, Any]]:
    """Name and entry of a catalogue's model by name, alias or hub id, in any case and whoever's copy it is.

    Raises HarnessError with the closest names.
    """
    entries = read_entries(FOLDER)
    spellings: dict[str, str] = {}
    for name, entry in entries.items():
        hub = entry.get("hub") or name
        for spelling in (hub, hub.rpartition("/")[2], *entry.get("aliases", ()), name):
            spellings[spelling.lower()] = name
    wanted = text.strip().lower()
    if wanted not in spellings:
        plain = {_plain(spelling): spelling for spelling in spellings}
        wanted = plain.get(_plain(wanted), wanted)
    if wanted not in spellings:
        close = suggestion(wanted.rpartition("/")[2], sorted(spellings), most=3)
        path = Path(text)
        is_path = not path.is_absolute() and (
            len(path.parts) > 1 or path.suffix in (".json", ".yaml", ".yml")
        )
        where = f" in {Path.cwd()}" if is_path else ""
        raise HarnessError(
            f"model '{text}' is neither in the catalogue nor a folder or file{where}. {close or ''} ".rstrip()
            + " `harness estimate --list models` lists the catalogue"
        )
    name = spellings[wanted]
    return name, entries[name]


TUNED = re.compile(r"^meta-|-(hf|chat|instruct|base|it)(?=-|$)")
"""Parts of names on the hub that leave the geometry as it is."""


def _plain(spelling: str) -> str:
    """A name on the hub without its owner and what does not decide shapes: 'llama-2-7b'."""
    return TUNED.sub("", spelling.rpartition("/")[2].replace("_", "-"))


def _read(path: Path) -> dict[str, Any]:
    text = read_settings(path, "--model")
    try:
        document = (
            json.loads(text, object_pairs_hook=mapping) if path.suffix == ".json" else parse_value(text)
        )
    except json.JSONDecodeError as error:
        raise HarnessError(f"--model {path} is not valid JSON, line {error.lineno}: {error.msg}") from error
    except RecursionError as error:
        raise HarnessError(f"--model {path} is nested too deeply") from error
    except ValueError as error:
        raise HarnessError(f"--model {path} {error}") from error
    if not isinstance(document, dict):
        raise HarnessError(f"--model {path} holds no mapping; give a Hugging Face configuration")
    return document
