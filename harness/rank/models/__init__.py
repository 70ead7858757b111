"""The job's model, its adapters, its optimizer and its loss."""
