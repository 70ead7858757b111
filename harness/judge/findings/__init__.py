"""Findings of a comparison: one module per concern, each a pure function of rows."""
