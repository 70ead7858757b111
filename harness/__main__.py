"""`python -m harness`, for launchers that start a module."""

from harness.cli import main

if __name__ == "__main__":
    main()
