"""Traces activations for one who asks again and again: a request a line, and a line for each answer."""

from __future__ import annotations

import json
import sys

from harness.rank.probes.activation_trace import profile_text


def main() -> None:
    """Answer until standard input ends; null for what cannot be traced, which must not cost the others."""
    for request in sys.stdin:
        try:
            text = profile_text(request)
        except Exception:
            text = None
        sys.stdout.write(json.dumps(text) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
