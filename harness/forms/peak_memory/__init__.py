"""What lives on a rank at the fullest moments of a step, by family."""
