"""What the commands of the command line do, a file for each; printing through click, like cli.py."""
