"""What a rank measures: memory, collectives, time, energy, weights."""
