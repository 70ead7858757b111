from tests.traps.matrix import matrix as matrix
