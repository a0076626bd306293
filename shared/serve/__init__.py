"""An OpenAI-compatible server: every stage is a model of one process, over one copy of the weights.

`driver` joins engines and asyncio and knows no HTTP. `app` has the routes, `protocol` what they
take and return, `metrics` what Prometheus reads, `server` how a process listens and ends.
"""
