"""How long a step takes: computing, communicating, and what the constants are from."""
