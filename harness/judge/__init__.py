"""Same-job check, parity, findings: pure functions of records that yield values; no torch."""
