"""One rank of a large world alone: the adapters' code on a process group that moves nothing."""
