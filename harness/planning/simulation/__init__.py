"""Simulated ranks: what is asked of them, and their figures next to closed forms."""
