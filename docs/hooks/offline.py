"""What a page or a style sheet would load from a network."""

from __future__ import annotations

import re

LOADING = re.compile(
    r"""<(?:script|img|iframe|source|audio|video|embed|object)\b[^>]*?\s(?:src|srcset|data)\s*=\s*["']?((?:https?:)?//[^"'\s>]+)
    | <link\b(?=[^>]*\srel\s*=\s*["']?(?:stylesheet|preload|prefetch|preconnect|modulepreload|icon)\b)
      [^>]*?\shref\s*=\s*["']?((?:https?:)?//[^"'\s>]+)
    | @import\s+["']((?:https?:)?//[^"']+)
    | url\(\s*["']?((?:https?:)?//[^"')\s]+)""",
    re.VERBOSE | re.IGNORECASE,
)


def loaded_from_elsewhere(text: str) -> list[str]:
    """Addresses of scripts, styles, fonts and pictures on other hosts, in HTML or CSS. Links do not count."""
    return [next(filter(None, match)) for match in LOADING.findall(text)]
