"""Tables, plots and markdown: pure functions of records, no torch."""
