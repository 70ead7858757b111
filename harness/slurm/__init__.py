"""Turns a matrix of cells into Slurm jobs, and what Slurm knows of them into records. Never imports torch."""
