"""What crosses between a launcher and its ranks: files in the folder of a run, and their record."""
