"""What each lane of library versions runs (noxfile.py), and the table of its results in docs/versions.md."""
