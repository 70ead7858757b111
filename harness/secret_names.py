"""Values whose names say that they are secret, as `MY_API_KEY=...` or `"password": "..."`.

The names are those of detect-secrets (plugins/keyword.py) and gitleaks' generic-api-key.
"""

from __future__ import annotations

import re

from harness.secret_patterns import OPEN, REDACTED, VALUE

# One of the names, after any prefix: MY_API_KEY, x-api-key, clientSecret.
_NAME = (
    r"(?:[Pp]ass(?:w(?:or)?d|phrase)|PASS(?:W(?:OR)?D|PHRASE)|(?<![A-Za-z])pwd|_PWD"
    r"|(?:db|user|smtp|ftp|proxy|root|admin|login)_?pass(?![a-z])|_PASS(?![A-Z])"
    r"|[Ss]ecret|SECRET|[Cc]redentials?|CREDENTIALS?|(?<![A-Za-z])[Cc]reds|_CREDS"
    r"|(?i:(?:api|access|account|auth|app|application|client|service|database|db|priv|private|signing"
    r"|encryption)[_-]?key)"
    r"|TOKEN(?![A-Z])|(?i:(?:access|auth|hub|hf|bearer|refresh|session|security|api|private|sas|oauth|git"
    r"|github|gitlab|wandb|registry|deploy)[_-]?token(?!iz|s))|(?<![A-Za-z_])token(?==))[A-Za-z_]*"
)
_LONGEST_BEGINNING = 24
"""Characters of a name before the word by which it is found."""
# What every such name has, up to what separates it from its value. Searching this first is ten times faster.
_FOUND = re.compile(
    r"""(?:[Pp](?:ass|ASS|wd|WD)|[Ss](?:ecret|ECRET)|[Cc](?:red|RED)|[Kk](?:ey|EY)|[Tt](?:oken|OKEN))"""
    r"""[A-Za-z_]*\\*(["']?)[ \t]*[=:]"""
)
_NAMED = re.compile(_NAME + r"""\\*["']?[ \t]*[=:]\Z""")
_VALUE = re.compile(r"[ \t]*" + OPEN + f"(?P<value>{VALUE})")
# After a quoted name, as in JSON.
_NUMBER = re.compile(r"[ \t]*[-+.\d][-+.\deE]*(?:[\s,}\]]|$)")


def without_named_secrets(text: str) -> str:
    """The text without the values of such names; numbers of a JSON document stay."""
    kept, end = [], 0
    for found in _FOUND.finditer(text):
        begin = max(end, found.start() - _LONGEST_BEGINNING)
        if found.start() < end or not _NAMED.search(text, begin, found.end()):
            continue
        if found[1] and _NUMBER.match(text, found.end()):
            continue
        if value := _VALUE.match(text, found.end()):
            kept += [text[end : value.start("value")], REDACTED]
            end = value.end()
    return "".join([*kept, text[end:]])
