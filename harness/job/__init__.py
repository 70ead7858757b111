"""What a job is. Validation touches neither the environment nor the network nor torch."""
