"""Traffic for engines and what is measured of it: arrivals, baselines, metrics, simulated engines.

May import `shared.engine` and `shared.models`.
"""
