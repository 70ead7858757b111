"""What is printed: results, progress, and that a silent command works."""
