"""The sections of the report: one module each, a pure function of rows that returns a `Section`."""
