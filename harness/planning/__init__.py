"""What a job will need and how fast it will be, said before it runs; no torch here."""
