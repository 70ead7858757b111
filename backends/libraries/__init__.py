"""What is known of the installed libraries: facts by version, what is installed, what compiles extensions."""
