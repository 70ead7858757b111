"""Devices and networks, their constants and limits."""
