"""DeepSpeed ZeRO: its configuration, its engine, and states that it keeps in files."""
