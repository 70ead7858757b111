"""Closed forms of memory and communication, by strategy family. Pure arithmetic, no torch."""
