"""What was measured, as files of other tools: scripts of one's own, and the trackers of runs."""
