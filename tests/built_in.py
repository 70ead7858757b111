"""Built-in backends by what their strategy does: one that is registered takes part in the tests by itself."""

from harness.backends import registry
from harness.backends.strategy import ShardingFacts


def facts(name: str) -> ShardingFacts:
    strategy = registry.BUILT_IN[name].strategy
    assert strategy is not None
    return strategy.facts


HYBRID = tuple(name for name in registry.BUILT_IN if facts(name).has_replicas)
"""They need two replicas of two shards."""
