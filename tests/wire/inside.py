"""The process inside a namespace: calls functions of this folder and prints what they return.

A line of JSON each: ["module:function", argument, ...]; {"value": ...} or {"error": traceback}.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module


def answer(question: str) -> dict[str, object]:
    """Call what one line names."""
    name, *arguments = json.loads(question)
    module, _, function = name.partition(":")
    try:
        return {"value": getattr(import_module(f"tests.wire.{module}"), function)(*arguments)}
    except BaseException:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    # Whatever else prints must not come between the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            print(json.dumps(answer(line)), file=answers, flush=True)
