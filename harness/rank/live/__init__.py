"""One reader of live models and optimizers, for runs and for observed scripts."""
