"""Words, tables, sections, pictures, writers: pure functions of a comparison; no torch."""
