"""Starts the ranks of a run and watches them. Loads torch only in processes that become ranks."""
