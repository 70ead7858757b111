"""Each sample divided among ranks: context parallelism (ring attention) and DeepSpeed Ulysses."""
