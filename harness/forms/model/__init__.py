"""What a model is to closed forms: its tensors and its activations."""
