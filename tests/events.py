"""What a rank has written so far, while it trains."""

import json
from pathlib import Path


def steps_taken(rank_file: Path) -> int:
    """Optimizer steps among the complete lines of a rank's events; 0 where there is no file yet."""
    text = rank_file.read_text(encoding="utf-8") if rank_file.exists() else ""
    lines = text.splitlines(keepends=True)
    return sum(json.loads(line)["kind"] == "step" for line in lines if line.endswith("\n"))
