"""Third parties' backends: what pip would leave of their distribution."""

from collections.abc import Mapping
from pathlib import Path

from backends import registry


def register(folder: Path, entry_points: Mapping[str, str]) -> None:
    """Make backends known, by name and 'module:Class', to whoever has this folder on its path."""
    information = folder / "planted-1.0.dist-info"
    information.mkdir(parents=True)
    information.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in entry_points.items()]
    text = "\n".join([f"[{registry.ENTRY_POINT_GROUP}]", *lines]) + "\n"
    information.joinpath("entry_points.txt").write_text(text)
