"""Writes `#SBATCH` lines, whose words sbatch itself splits and unquotes."""

from __future__ import annotations

from harness.errors import HarnessError


def directive(option: str, value: str | int | None = None) -> str:
    """One `#SBATCH --option=value` line that sbatch reads back as given; None: an option without a value.

    sbatch takes quotes, backslashes and `#` as a shell does; the shell sees a comment as long as the line
    does not end. Raises HarnessError for a value with a line break or another control character.
    """
    if value is None:
        return f"#SBATCH --{option}"
    text = str(value)
    refuse_control_characters(text, f"--{option}")
    if text and all(c.isalnum() or c in "_-.,:=+@/%[]" for c in text):
        return f"#SBATCH --{option}={text}"
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'#SBATCH --{option}="{escaped}"'


def refuse_control_characters(text: str, where: str) -> None:
    """Raise HarnessError if `text` could end the line that it is written into, or is no text at all."""
    found = next((c for c in text if ord(c) < 32 or ord(c) == 127 or c in "\x85\u2028\u2029"), None)
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise HarnessError(f"{where} was given {text!r}, which is not UTF-8; give a name that is")
    if found is not None:
        raise HarnessError(
            f"{where} was given {text!r}: a job script has no place for the control character {found!r}; "
            "leave it out"
        )
