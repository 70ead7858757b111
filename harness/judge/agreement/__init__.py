"""Whether runs trained the same job to the same losses and weights, and why not."""
