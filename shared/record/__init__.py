"""Recording the traces that the site shows (`python -m shared.record`)."""
