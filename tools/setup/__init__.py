"""What sets up: the virtual environment, a folder to build a stage in."""
