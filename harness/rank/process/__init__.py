"""A rank as a process: its start, environment, signals and turns."""
