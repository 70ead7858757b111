"""Small faults of the source, each of which a test must notice."""
