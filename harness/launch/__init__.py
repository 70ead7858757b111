"""Starts ranks and turns what they leave behind into records. Never imports torch."""
