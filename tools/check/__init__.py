"""What checks the code: doors, diffs between stages, planted faults."""
