"""The demo: the same traffic through two stages, live in the terminal (`python -m shared.demo`)."""
