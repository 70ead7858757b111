"""Text from libraries, third parties and users, made safe to keep and to print."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

REDACTED = "***"
SHORTEST_SECRET = 8
"""Characters of a variable's value: shorter ones are words such as 'false'."""


# What a key that is no secret belongs to: rows and columns of data, settings, states.
_NO_SECRET = (
    r"(?:sort|order|group|partition|primary|foreign|public|join|index|cache|input|output|prompt|response|answer"
    r"|question|chosen|rejected|label|target|source|src|tgt|text|caption|image|audio|video|speech|data|dataset"
    r"|feature|column|row|field|messages?|sample|batch|split|train|eval|test|val(?:id(?:ation)?)?|reward|score"
    r"|query|context|completion|instruction|id|name|value|state|dict|json|config|metric|monitor|loss|logits?"
    r"|lr|weight|param|mask|attention|step|epoch|time|rng|prng|random|dropout|object)"
)
# Names of options and of values alike, besides those below.
_MORE = r"(?:pat|jwt|dsn|webhook(?:[-_]?url)?|connection[-_]?string)"
_OPTION = (
    rf"--(?i:(?!(?:[\w-]*[-_])?{_NO_SECRET}[-_]?keys?\b)"
    r"(?:[\w-]*[-_])?(?:pass(?:w(?:or)?d|phrase)?|pwd?|token|secret(?:[-_]id)?|credentials?|creds|auth"
    rf"|{_MORE}|cookies?|session[-_]?id|otp|(?:api|access|auth|secret|private)[-_]?keys?|key))"
)
# A value is what stands between quotes, escaped characters in pairs, or one word. Its opening quote stays.
# Quotes have backslashes before them where text of JSON is a value of JSON.
OPEN = r"""(?:\\*["'](?!\*\*\*))?"""
VALUE = (
    r"""(?:(?<=\\["'])[^"'\\\n]+|(?<=[^\\]")(?:\\.|[^"\\\n])+|(?<=[^\\]')(?:\\.|[^'"\\\n])+"""
    r"""|(?<!["'])(?!(?:null|None|true|false|True|False)\b|\*\*\*)[^\s"'\\,;&{}\[\]]+)"""
)
_PARTS = {"<option>": _OPTION, "<open>": OPEN, "<value>": VALUE}


SECRET_PATTERNS: list[tuple[list[str], re.Pattern[str]]] = [
    (secret["needles"], re.compile(re.sub("<(?:option|open|value)>", lambda p: _PARTS[p[0]], secret["form"])))
    for secret in tomllib.loads(Path(__file__).with_name("secrets.toml").read_text("utf-8"))["secret"]
]
"""Forms of secrets, whose first group stays where they have one, with needles in lower case. Text without any
of these holds no such secret: looking for them first is much faster."""

# One of the names, after any prefix: MY_API_KEY, x-api-key, clientSecret.
_NAME = (
    r"(?:[Pp]ass(?:w(?:or)?d|phrase)|PASS(?:W(?:OR)?D|PHRASE)|(?<![A-Za-z])[Pp]wd|_PWD"
    r"|(?i:(?<![A-Za-z])(?:pw|auth)(?![A-Za-z_])|session[_-]?id|sessid|csrf[_-]?token)"
    r"|(?<![A-Za-z])KEY(?![A-Za-z_])|_KEY(?![A-Z])"
    r"|(?:db|user|smtp|ftp|proxy|root|admin|login)_?pass(?![a-z])|_PASS(?![A-Z])"
    r"|[Ss]ecret|SECRET|[Cc]redentials?|CREDENTIALS?|(?<![A-Za-z])[Cc]reds|_CREDS"
    r"|(?i:(?:api|access|secret|account|auth|app|application|client|service|database|db|priv|private|signing"
    r"|encryption|license|master|subscription|wandb|hf|ssh)[_-]?key)"
    r"|TOKEN(?![A-Z])|(?i:(?:access|auth|hub|hf|bearer|refresh|session|security|api|private|sas|oauth|git"
    r"|github|gitlab|wandb|registry|deploy|vault)[_-]?token(?!iz|s))|(?<![A-Za-z_])token(?==)"
    rf"|(?i:(?<![A-Za-z]){_MORE}(?![A-Za-z])))[A-Za-z_]*"
)
_LONGEST_BEGINNING = 24
"""Characters of a name before the word by which it is found."""
# What every such name has, up to what separates it from its value. Searching this first is ten times faster.
_FOUND = re.compile(
    r"""(?:[Pp](?:ass|ASS|wd?|WD?)|[Aa](?:uth|UTH)|(?i:sess(?:ion)?[_-]?id)|[Ss](?:ecret|ECRET)|[Cc](?:red|RED)|[Kk](?:ey|EY)|[Tt](?:oken|OKEN)|(?i:pat|jwt|dsn|webhook(?:[_-]url)?|connection[_-]?string))"""
    r"""[A-Za-z_]*\\*(["']?)[ \t]*[=:]"""
)
_END = r"""\\*["']?[ \t]*[=:]\Z"""
_NAMED = re.compile(_NAME + _END)
_NO_SECRETS_KEY = re.compile(
    rf"(?i:(?<![a-z]){_NO_SECRET}[-_ ]?key|secretar(?:y|ies|iat)"
    rf"|_(?:length|helper|policy|type|method|manager|provider|count)){_END}"
)
# Names of other things too: their numbers stay, and what is no mixture of letters and digits after some.
_PLAIN = re.compile(r"(?:(?i:pw|auth(?==))|(?P<mixed>KEY|(?i:auth|pat)))" + _END)
_MIXTURE = re.compile(r"(?!(?i:v|oauth)\d)(?=[^A-Za-z]*[A-Za-z])(?=\D*\d)")
_VALUE = re.compile(r"[ \t]*" + OPEN + f"(?P<value>{VALUE})")
_NUMBER = re.compile(r"""[ \t]*[-+.\d][-+.\deE]*(?:[\s,;)}\]"'\\]|$)""")


def without_named_secrets(text: str) -> str:
    """The text without the values of such names."""
    kept, end = [], 0
    for found in _FOUND.finditer(text):
        begin = max(end, found.start() - _LONGEST_BEGINNING)
        if found.start() < end or not (name := _NAMED.search(text, begin, found.end())):
            continue
        plain = _PLAIN.match(name[0])
        # A quoted name is one of JSON, whose numbers stay.
        if _NO_SECRETS_KEY.search(text, begin, found.end()) or (
            (found[1] or plain) and _NUMBER.match(text, found.end())
        ):
            continue
        value = _VALUE.match(text, found.end())
        if value and (not plain or not plain["mixed"] or _MIXTURE.match(value["value"])):
            kept += [text[end : value.start("value")], REDACTED]
            end = value.end()
    return "".join([*kept, text[end:]])


MOST_MESSAGE_BYTES = 8 * 2**10
MOST_CONSIDERED = 8 * MOST_MESSAGE_BYTES
"""Characters of an exception's message: half of them its beginning, half its end."""
MOST_LOG_TAIL_BYTES = 32 * 2**10

# Control characters but tab and newline, marks that reverse text or break lines, what XML excludes.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufffe\uffff\ud800-\udfff]"
)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

QUOTED_TRACEBACK = "Traceback (most recent call last)"


def harmless(text: str) -> str:
    """The text with terminal escapes and characters that reverse or break lines spelled out: \\u001b.

    The spelling is that of JSON, so a JSON document keeps its meaning.
    """
    return _HARMFUL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def encodable(text: str) -> str:
    """The text with lone surrogates, which no file in UTF-8 can hold, spelled out."""
    return _LONE_SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def redacted(text: str) -> str:
    """The text without users and passwords in addresses, tokens, and values that are named as secrets.

    So are those of this process's environment, wherever they stand. A JSON document stays one.
    """
    for name, value in os.environ.items():
        if len(value) >= SHORTEST_SECRET and not value.startswith("/") and _is_secret(name, value):
            # As texts have it, as those of JSON do first: of an escape no half may stay.
            escaped = {json.dumps(value, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True)}
            for written in sorted(escaped | {value}, key=len, reverse=True):
                text = text.replace(written, REDACTED)
    lower = text.lower()
    for needles, pattern in SECRET_PATTERNS:
        if any(needle in lower for needle in needles):
            text = pattern.sub(rf"\g<1>{REDACTED}" if pattern.groups else REDACTED, text)
    return without_named_secrets(text)


@cache
def _is_secret(name: str, value: str) -> bool:
    """Whether a variable's name marks its value as secret."""
    quoted = json.dumps(value)
    return quoted not in without_named_secrets(f"{name}={quoted}")


def capped(text: str, most_bytes: int) -> str:
    """The beginning of a text whose UTF-8 form would be longer."""
    data = text.encode(errors="replace")
    if len(data) <= most_bytes:
        return text
    return data[:most_bytes].decode(errors="ignore") + f" [{len(data) - most_bytes} bytes left out]"


def capped_tail(text: str, most_bytes: int) -> str:
    """The end of a text whose UTF-8 form would be longer."""
    data = text.encode(errors="replace")
    if len(data) <= most_bytes:
        return text
    return f"[{len(data) - most_bytes} bytes left out] " + data[-most_bytes:].decode(errors="ignore")


def said(error: BaseException) -> str:
    """What an exception says, however badly it behaves when it is asked; of a long text its ends."""
    try:
        text = str(error) or repr(error)
    except BaseException as second:  # a third party's __str__ may raise anything
        text = f"{type(error).__name__} (its message cannot be shown: {type(second).__name__})"
    if len(text) > MOST_CONSIDERED:  # patterns of secrets and of memory take minutes over 50 MB
        text = f"{text[: MOST_CONSIDERED // 2]}\n{text[-MOST_CONSIDERED // 2 :]}"
    return text


def described(error: BaseException) -> str:
    """What an exception says, encodable, redacted and capped.

    Libraries quote tracebacks of other ranks or processes in messages: their first and last lines stay.
    """
    text = said(error)
    if QUOTED_TRACEBACK in text:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        text = f"{lines[0]} ... {lines[-1]}"
    return capped(redacted(encodable(text)), MOST_MESSAGE_BYTES)


def first_line(error: BaseException) -> str:
    """Of what an exception says, with its kind where Python raises it about objects of a program."""
    line = next(iter(described(error).strip().splitlines()), "")
    of_code = isinstance(error, (TypeError, LookupError, AttributeError, NameError))
    return f"{type(error).__name__}: {line}" if of_code else line


OPTION = "--config"
PASSWORD_OPTION = "-p"
NO_PASSWORD = re.compile(r"[\d.,:/-]+")
"""Ports and their mappings."""
PARTITION = ("srun", "sbatch", "salloc")
"""Programs whose -p is a partition."""


def without_passwords(words: Sequence[str]) -> list[str]:
    """The words without those after -p, which is a password of many programs."""
    kept = list(map(encodable, words))
    for index, (option, word) in enumerate(pairwise(words), 1):
        if option == PASSWORD_OPTION and not NO_PASSWORD.fullmatch(word):
            is_of_slurm = any(Path(earlier).name in PARTITION for earlier in words[: index - 1])
            kept[index] = word if is_of_slurm else REDACTED
    return kept


KeptCommand = Annotated[list[str], AfterValidator(without_passwords)]
"""The words of a command in a file that is kept."""


def inside(folder: Path, words: Sequence[str]) -> list[str]:
    """Absolute configuration files in a folder as they are called from there."""
    return _changed(
        words, lambda path: str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
    )


def by_name(words: Sequence[str]) -> list[str]:
    """Absolute configuration files by their names."""
    return _changed(words, lambda path: path.name)


def _changed(words: Sequence[str], change: Callable[[Path], str]) -> list[str]:
    changed = []
    for before, word in zip(["", *words], words, strict=False):
        option, equals, value = word.partition("=")
        if before == OPTION and Path(word).is_absolute():
            word = change(Path(word))
        elif option == OPTION and equals and Path(value).is_absolute():
            word = f"{OPTION}={change(Path(value))}"
        changed.append(word)
    return changed
