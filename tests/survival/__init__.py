"""Comparisons of real ranks that are killed, share a folder, or fill a disk: minutes, not seconds."""
