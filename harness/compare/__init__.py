"""Same-job check and parity: pure functions of records, no torch."""
