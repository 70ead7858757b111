"""Whether this installation can be trusted: what runs here, known traps, and a self-check."""
