"""Benchmarks: what each stage buys, measured so that a sceptic can check it.

`python -m shared.bench` lists them. `metrics` defines every number, `workloads` the requests,
`runner` sends them, `results` keeps the numbers, and each other module is one benchmark.
"""
