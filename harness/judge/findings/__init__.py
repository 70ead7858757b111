"""Findings of a comparison: one module per subject, each finding a pure function of rows."""
