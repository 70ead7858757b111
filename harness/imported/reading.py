"""Reads files of DeepSpeed and Accelerate key by key: what each means and asks for; unknown keys are errors.

The files are unchecked, so reading is bounded. Rules are in the tables beside this module. Defaults are asked
of the installed library in a process of its own and kept per version in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from harness.backends.libraries.facts import why_not_run
from harness.backends.refusals import available, suggestion
from harness.backends.yaml_values import parse_value, require_bounded
from harness.errors import HarnessError
from harness.files import read_settings, user_cache, write_atomically
from harness.import_path import ask_module
from harness.job.config import parse_yaml
from harness.nested import empty_sections, leaves, parse_json, value_at
from harness.record import FileKind
from harness.safe_text import capped

BYTE_ORDER_MARK = "\ufeff"
"""What some editors write first."""
_STRING = r'("(?:[^"\\]|\\.)*")'
_COMMENT = re.compile(_STRING + r"|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_LAST_COMMA = re.compile(_STRING + r"|,(?=\s*[}\]])", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class GivenFile:
    """A file and its content."""

    path: Path
    document: dict[str, Any]
    sha256: str


def read_file(path: Path, what: str, *, suffix: str = ".json", has_comments: bool = False) -> GivenFile:
    """A mapping of settings in JSON or, of any other suffix, YAML.

    has_comments: in JSON comments and a comma after the last value are left out, as DeepSpeed's own reader
    does. Raises HarnessError: TOML, unreadable, too large, a key twice, NaN, too deep, no mapping.
    """
    if path.suffix == ".toml":
        raise HarnessError(
            f"{what} {path}: DeepSpeed and Accelerate read no TOML; give the file that your launcher uses"
        )
    form = "JSON" if suffix == ".json" else "YAML"
    text = read_settings(path, what, f"; give a {form} file that can be read").removeprefix(BYTE_ORDER_MARK)
    document: Any
    try:
        if suffix != ".json":
            document = parse_yaml(text, f"{what} {path}")
        else:
            try:
                document = parse_json(text)
            except json.JSONDecodeError:
                if not has_comments:
                    raise
                bare = _COMMENT.sub(lambda found: found[1] or "\n" * found[0].count("\n"), text)
                document = parse_json(_LAST_COMMA.sub(lambda found: found[1] or "", bare))
        require_bounded(document)
    except json.JSONDecodeError as error:
        raise HarnessError(
            f"{what} {path} is not valid JSON, line {error.lineno}: {error.msg}"
            + ("" if has_comments else "; comments are not JSON")
        ) from error
    except RecursionError as error:
        raise HarnessError(f"{what} {path} is nested too deeply") from error
    except ValueError as error:
        raise HarnessError(f"{what} {path} {error}") from error
    if not isinstance(document, dict):
        holds = "is empty" if document is None else f"holds a {type(document).__name__}"
        raise HarnessError(f"{what} {path} {holds}; it must be a mapping of settings")
    return GivenFile(path=path, document=document, sha256=hashlib.sha256(text.encode()).hexdigest())


MOST_POWER = sys.float_info.max_exp
PRECISIONS = {"no": "fp32", "fp32": "fp32", "bf16": "bf16-mixed", "fp16": "fp16-mixed"}
"""`mixed_precision` and `training.precision`."""
DTYPES = {"fp16": "fp16", "float16": "fp16", "half": "fp16", "torch.float16": "fp16", "bf16": "bf16",
          "bfloat16": "bf16", "torch.bfloat16": "bf16", "fp32": "fp32", "float32": "fp32", "float": "fp32",
          "torch.float32": "fp32"}  # fmt: skip
"""DeepSpeed's names of dtypes, and one for each."""
PREFETCH = {"backward_pre": "pre", "backward_post": "post", "no_prefetch": "none"}


def boolean(value: Any) -> bool:
    """true or false, also as YAML 1.1 and command lines write them. Raises ValueError."""
    known = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in known:
        return known[value.lower()]
    raise ValueError("give true or false")


def integer(value: Any) -> int:
    """A whole number, also as 5e8 or '5e8'. Raises ValueError."""
    number_ = number(value)
    if number_ != int(number_):
        raise ValueError("give a whole number")
    return int(number_)


def number(value: Any) -> float:
    """A finite number. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("give a number")
    try:
        found = float(value)
        if not abs(found) <= 2**63:  # nan neither
            raise ValueError
    except (ValueError, OverflowError) as error:
        raise ValueError("give a number") from error
    return found


def alike(left: Any, right: Any) -> bool:
    """Whether a file's value means the same as another: 5e8 is 500000000, 'no' is false."""
    if isinstance(right, bool) or isinstance(left, bool):
        try:
            return boolean(left) == boolean(right)
        except ValueError:
            return False
    if isinstance(right, (int, float)):
        try:
            return number(left) == right
        except ValueError:
            return False
    if isinstance(left, str) and isinstance(right, str):
        return left.lower() == right.lower()
    return bool(left == right)


def at(document: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None: there is none."""
    return value_at(dict(document), tuple(key.split(".")))


def clipping(value: Any) -> float | None:
    """DeepSpeed writes 0 for no clipping."""
    return number(value) or None


def power_of_two(value: Any) -> float:
    power = integer(value)
    if power >= MOST_POWER:
        raise ValueError(f"2^{power} is not a number; at most 2^{MOST_POWER - 1}")
    return math.ldexp(1.0, power)


def communication_dtype(value: Any) -> str | None:
    """None: DeepSpeed's default. Raises ValueError for what its `get_communication_data_type` refuses."""
    if value is None:
        return None
    if (name := str(value).lower()) not in DTYPES.values():
        raise ValueError("give fp32, fp16 or bf16, the names that DeepSpeed takes here")
    return name


def accumulation_dtype(value: Any) -> str | None:
    """None: DeepSpeed's default. Raises ValueError for what is no floating dtype of its `DtypeEnum`."""
    if value is None:
        return None
    if not isinstance(value, str) or value not in DTYPES:
        raise ValueError(f"give {', '.join(DTYPES)}")
    return DTYPES[value]


def some_leaves(value: Any) -> str | None:
    """Raises ValueError for what is no list of names."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("give a list of names")
    return "blocks" if value else None


def first(value: Any) -> float:
    """The first of two numbers. Raises ValueError."""
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("give two numbers")
    found, _ = (number(one) for one in value)
    return found


def precision(value: Any) -> str:
    """Raises ValueError for fp8 and what is no precision."""
    name = "no" if value in (False, None) else str(value).lower()
    if name not in PRECISIONS:
        own = "; `training.precision: fp8` of the job is torchao's" if name == "fp8" else ""
        raise ValueError(f"Accelerate files of {', '.join(PRECISIONS)} are run{own}")
    return PRECISIONS[name]


def backward_prefetch(value: Any) -> str:
    name = "no_prefetch" if value in (None, False) else str(value).lower()
    if name not in PREFETCH:
        raise ValueError(f"give {', '.join(map(str.upper, PREFETCH))}")
    return PREFETCH[name]


def wrapping(value: Any) -> str | None:
    """'none': the whole model is one unit. Raises ValueError for a policy that no row has."""
    name = "NO_WRAP" if value is None else str(value).upper()
    if name not in ("NO_WRAP", "TRANSFORMER_BASED_WRAP"):
        raise ValueError("unsupported: a unit is a transformer block (TRANSFORMER_BASED_WRAP) or the whole "
                         "model (NO_WRAP)")  # fmt: skip
    return "none" if name == "NO_WRAP" else None


AUTO = "auto"
"""DeepSpeed's files: Accelerate or Trainer fills the value in."""
LIBRARY = "library"
"""In place of a default: the installed library's own (`library_defaults`)."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What a key means here: a row of the tables next to this module."""

    kind: Literal["job", "option", "preset", "fixed", "not_used", "off", "chooses", "schedule"]
    """A setting of the job; an option of the backend; what the preset decides, with no option of its own; one
    value in every run; no part of a run; a feature that no run has, accepted where it is switched off; what
    chooses the backend or its offload; an argument of DeepSpeed's scheduler."""
    target: Any
    """The setting, dotted; the option; the setting as `backends.presets` names it; why it is not used; the
    feature."""
    default: Any = LIBRARY
    """The library's, which needs no option; of 'fixed' the value of every run."""
    convert: Callable[[Any], Any] | None = None
    """The value here from the file's. Raises ValueError saying what is allowed."""
    reason: str | None = None
    """What to know although the value is taken; of 'fixed' why it is so."""
    refuses: bool = False
    """Of 'fixed': another value would be another strategy, so it is refused, not pinned."""
    at: Sequence[int] | None = None
    """Stages of ZeRO, or versions of FSDP, at which the library reads it; elsewhere it has no effect."""
    option: str | None = None
    """Of 'preset': the option of the backend that holds another value than the preset's."""

    def is_read(self, at: int) -> bool:
        return self.at is None or at in self.at

    def without_effect(self, what: str) -> Rule:
        """Rule of a key that the library does not read at this stage or version."""
        assert self.at is not None
        where = ", ".join(map(str, self.at))
        reads = f"the library reads it at {what} {where} only" if self.at else "the library does not read it"
        return Rule(kind="not_used", target=reads, convert=self.convert)

    @property
    def why_off(self) -> str:
        """Why no run has a feature."""
        why = why_not_run(self.target)
        why = why or f"no backend, option or setting of this version has {self.target}"
        return f"unsupported: {why}; leave it out or switch it off"


@dataclass(frozen=True, kw_only=True)
class KeyResolution:
    """One key of a file."""

    name: str
    given: Any
    rule: Rule
    value: Any = None
    """`given` in the terms of this project; AUTO: left to the job."""
    used: Any = None
    """Of 'chooses': what it chose."""
    is_absent: bool = False
    """Whether the file does not give it, and `value` is the library's default."""


Value = TypeVar("Value")
MOST_SHOWN = 200
"""Bytes of a refused value."""
MOST_LISTED = 20
"""Keys of a section: more are not listed."""
HARMLESS: tuple[Any, ...] = (None, False, -1, "", "no", "none", "auto", {}, [])
"""Values of a feature that is not asked for."""


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A file in this project's terms."""

    backend: str
    """Name in the registry."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options that choose the strategy, such as its offload."""
    resolutions: list[KeyResolution]
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the job, dotted, that several keys decide together."""


class Refusals:
    """Collects what a file asks for that no run can have, so that a person sees all of it at once."""

    prefix = ""
    """Before the keys in messages and resolutions: the name of the file that another one names."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.keys: list[str] = []
        """Those of `add` and `unknown`, dotted."""

    def add(self, key: str, given: Any, reason: str) -> None:
        self.keys.append(self.prefix + key)
        self.found.append(f"'{self.prefix}{key}' was given {capped(repr(given), MOST_SHOWN)}: {reason}")

    def read(self, convert: Callable[[Any], Value], key: str, given: Any, otherwise: Value) -> Value:
        """A value as it is converted; `otherwise` where that refuses it."""
        try:
            return convert(given)
        except ValueError as error:
            self.add(key, given, str(error))
            return otherwise

    def choose(self, key: str, given: Any, allowed: range, how: str) -> int:
        """A number out of these; the first of them where another thing was given."""
        with suppress(ValueError):
            if (number := integer(given)) in allowed:
                return number
        self.add(key, given, how)
        return allowed[0]

    def unknown(self, key: str, known: Iterable[str]) -> None:
        """Name the first part of a dotted key that is unknown, and what may stand in its place."""
        self.keys.append(self.prefix + key)
        parts, names = key.split("."), [name.split(".") for name in known]
        below = sorted(".".join(name) for name in names if name[: len(parts)] == parts)
        if below:
            self.found.append(f"'{self.prefix}{key}' is a section of keys such as '{below[0]}', not a value")
            return
        depth = next(
            (d for d in range(len(parts)) if not any(n[: d + 1] == parts[: d + 1] for n in names)),
            len(parts) - 1,
        )
        allowed = {n[depth] for n in names if len(n) > depth and n[:depth] == parts[:depth]}
        where = f" in {'.'.join(parts[:depth])}" if depth and allowed else ""
        listed = available(parts[depth], sorted(allowed), f"Allowed{where}") if allowed else "No keys below"
        text = f"'{self.prefix}{'.'.join(parts[: depth + 1])}' is unknown. "
        homes = [".".join(name[:-1]) for name in names if len(name) > 1 and name[-1] == parts[depth]]
        if len(allowed) <= MOST_LISTED:
            text += listed
        elif homes:
            text += f"It belongs in '{homes[0]}'"
        else:
            close = suggestion(parts[depth], sorted(allowed))
            text += close or f"None of the {len(allowed)} keys{where} is close; remove it"
        if text not in self.found:
            self.found.append(text)


def resolutions_of(
    document: Mapping[str, Any], keys: Mapping[str, Rule], sections: Mapping[str, Rule], refusals: Refusals,
    converted: Mapping[str, Any], place: tuple[str, int],
) -> list[KeyResolution]:  # fmt: skip
    """A resolution for every key of a document; what cannot be is added to `refusals`.

    `converted`: values of keys that are read together, in this project's terms; `place`: 'stage' of ZeRO or
    'fsdp_version', and which.
    """

    def in_section(key: str, names: Iterable[str]) -> str | None:
        return next((name for name in names if key == name or key.startswith(f"{name}.")), None)

    refused = set()  # sections of features that no run has and that are not switched off, refused as a whole
    for name, rule in sections.items():
        given = at(document, name)
        by_key = any(key.startswith(f"{name}.") for key in keys)
        if rule.kind == "off" and not by_key and not _is_off(given):
            refusals.add(name, given, rule.why_off)
            refused.add(name)
    for parts in empty_sections(dict(document)):
        key = ".".join(parts)
        known = key in keys or any(name.startswith(f"{key}.") for name in [*keys, *sections])
        if not known and in_section(key, sections) is None:
            refusals.unknown(key, [*keys, *sections])
    found = []
    for parts, given in leaves(dict(document)):
        key = ".".join(parts)
        if in_section(key, refused) is not None:
            continue
        rule_here = keys.get(key) or sections.get(in_section(key, sections) or "")
        if rule_here is None:
            if given is not None or not any(other.startswith(f"{key}.") for other in keys):
                refusals.unknown(key, [*keys, *sections])  # else it is an empty section
            continue
        if not rule_here.is_read(place[1]):
            rule_here = rule_here.without_effect(place[0])
        value: Any = AUTO
        if rule_here.kind == "off":
            value = None
            if not _is_off(given):
                refusals.add(key, given, rule_here.why_off)
                continue
        elif key in converted:
            value = converted[key]
        elif given != AUTO:
            try:
                value = given if rule_here.convert is None else rule_here.convert(given)
            except ValueError as error:
                refusals.add(key, given, str(error))
                continue
            if rule_here.refuses and not alike(given, rule_here.default):
                why = f"every run has {rule_here.default!r}: {rule_here.reason}; set it so or leave it out"
                refusals.add(key, given, why)
                continue
        found.append(KeyResolution(name=refusals.prefix + key, given=given, rule=rule_here, value=value))
    return found


def _is_off(given: Any) -> bool:
    """Whether a section asks for nothing: it is empty, or its switch is off."""
    if not isinstance(given, dict):
        return given in HARMLESS or alike(given, False)
    switches = {"enabled": False, "disable": True}
    switched = [(given[name], off) for name, off in switches.items() if name in given]
    if switched:
        return all(alike(value, off) or (off is not True and value in HARMLESS) for value, off in switched)
    return all(_is_off(value) for value in given.values())


COMPUTE_DTYPE = "the compute dtype"
"""What DeepSpeed takes where keys of dtypes are absent."""


def _rule(row: dict[str, Any]) -> Rule:
    (kind, target), *others = row.items()
    given = dict(others) | ({"default": target} if kind == "fixed" else {})
    if "convert" in given:
        given["convert"] = globals()[given["convert"]]
    return Rule(kind=kind, target=target, **given)  # type: ignore[arg-type]


def read_table(name: str) -> dict[str, Any]:
    """One of the tables next to this module."""
    found: dict[str, Any] = parse_value(files(__package__).joinpath(f"{name}.yaml").read_text("utf-8"))
    return found


KEYS: dict[FileKind, dict[str, Rule]] = {}
"""Dotted, by kind of file."""
SECTIONS: dict[FileKind, dict[str, Rule]] = {}
"""Sections whose keys share one rule, unless a key has its own."""
for _kind in get_args(FileKind):
    _table = {
        section: {key: rule for keys, row in rows.items() for rule in [_rule(row)] for key in keys.split()}
        for section, rows in read_table(_kind).items()
    }
    SECTIONS[_kind] = _table.pop("sections")
    KEYS[_kind] = {
        key if section == "keys" else f"{section}.{key}": rule
        for section, rules in _table.items()
        for key, rule in rules.items()
    }


QUESTION = "harness.imported.read_defaults"
BETWEEN = "--- defaults ---"
"""Printed by it before the answer."""
SECONDS = 300.0
"""Importing a library from a slow disk takes long."""


@cache
def library_defaults(kind: FileKind) -> dict[str, Any]:
    """What `read_defaults` prints. Raises HarnessError where the library is missing or fails."""
    reads = f"to read a configuration of {kind}, the defaults of the installed {kind} are needed"
    try:
        versions = [version(kind), version("torch"), str(find_spec(kind)), sys.version]
    except PackageNotFoundError as error:
        raise HarnessError(f"{reads}: install '{error.name}', which its rows need too") from error
    code = Path(__file__).with_name("read_defaults.py").read_bytes()
    key = hashlib.sha256(code + " ".join(versions).encode()).hexdigest()[:24]
    kept = user_cache() / "library-defaults" / f"{kind}-{key}.json"
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        return found
    try:
        ran = ask_module(QUESTION, kind, seconds=SECONDS, CUDA_VISIBLE_DEVICES="")
    except OSError as error:
        raise HarnessError(f"no process can be started to read the defaults of {kind}: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise HarnessError(
            f"importing {kind} to read its defaults took over {SECONDS:.0f} s; try again"
        ) from error
    text = ran.stdout.rpartition(BETWEEN)[2].strip()
    if ran.returncode or not text.startswith("{"):
        last = next(iter(ran.stderr.strip().splitlines()[::-1]), "no message")
        raise HarnessError(f"{reads}, which cannot be imported: {last}")
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, text)
    answer: dict[str, Any] = json.loads(text)
    return answer


def deepspeed_values(stage: int) -> dict[str, Any]:
    """Defaults by the dotted keys of DeepSpeed's JSON, at a stage of ZeRO."""
    found = library_defaults("deepspeed")
    sections = {"fp16": found["fp16"], "bf16": found["bf16"], "zero_optimization": found["zero"][str(stage)]}
    dotted = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
    return found["top"] | dotted


def with_defaults(rules: dict[str, Rule], values: dict[str, Any]) -> dict[str, Rule]:
    """The rules, with the library's defaults where they ask for them."""
    return {
        key: replace(rule, default=values.get(key)) if rule.default == LIBRARY else rule
        for key, rule in rules.items()
    }
