"""Whether figures measured on this machine's GPUs can be trusted: tiny runs, and a line for each check."""
