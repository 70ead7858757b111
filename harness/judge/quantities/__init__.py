"""Quantities of one run, measured and as the closed forms say."""
