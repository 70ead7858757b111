"""The first two pages of a report: what was measured, the answer, what to use, and how to check it."""
