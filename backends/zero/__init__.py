"""DeepSpeed ZeRO: its configuration and its engine."""
