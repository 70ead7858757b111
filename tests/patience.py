"""How long tests wait for what must come: it ends a wait that would have no end, on the busiest machine."""

SECONDS = 300.0
