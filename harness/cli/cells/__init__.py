"""Runs the cells of a matrix: checks before, what is missing, further rounds."""
