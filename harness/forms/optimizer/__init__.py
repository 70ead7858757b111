"""States of optimizers, and what an update does with them."""
