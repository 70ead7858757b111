"""FSDP1 and FSDP2: states and traffic."""
