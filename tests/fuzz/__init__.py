"""Hostile input: whatever a file or a command line holds, there is a result or one line that refuses it."""
