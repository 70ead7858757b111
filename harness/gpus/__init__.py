"""The GPUs that torch can use here, and why there are none. Nothing here loads torch in its own process."""
