"""Layers cut over ranks: DTensor, alone or with FSDP2, and DeepSpeed AutoTP."""
