"""What a job will need and how fast it will be, predicted before it runs; no torch here."""
