"""One rank of a large world in a process of its own: the adapters' code on a process group that moves nothing."""
