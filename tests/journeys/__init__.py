"""Chains of real commands on real records: each step reads what the one before wrote."""
