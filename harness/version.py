"""The version of the package, in one place that needs no installation."""

__version__ = "0.1.0"
