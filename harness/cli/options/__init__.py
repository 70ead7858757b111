"""What commands share: options, the reading of arguments, exit codes."""
