"""torch FullyShardedDataParallel (FSDP1) and fully_shard (FSDP2)."""
