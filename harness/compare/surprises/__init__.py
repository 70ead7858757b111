"""Measured differences from the textbook and from defaults, and defaults that would change results."""
