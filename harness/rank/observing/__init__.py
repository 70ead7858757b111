"""Measures a training script that is not the harness's, from inside its processes."""
