"""Pictures: one palette, and each figure once, for benchmarks, demo, notebooks and site.

May import `shared.engine`, `shared.models` and `shared.measure`.
"""
