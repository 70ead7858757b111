"""Configuration files of Accelerate and DeepSpeed as rows of a comparison. Imports neither library."""
