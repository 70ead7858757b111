"""The model under a strategy: its units, its weights piece by piece, its dtypes and inputs."""
