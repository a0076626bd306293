"""Pictures: one palette, and each figure once, for benchmarks, demo, notebooks and site.

May import the rooms above it: `shared.engine`, `shared.models`, `shared.measure`.
"""
