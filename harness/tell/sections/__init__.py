"""Sections of the report, each a pure function of a comparison that returns a `Section` or None."""
