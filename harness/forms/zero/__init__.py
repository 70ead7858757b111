"""DeepSpeed ZeRO: states and traffic by stage."""
