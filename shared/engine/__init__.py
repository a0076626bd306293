"""What every engine needs and no stage is about: requests, sampling, text, step records.

Imports no other package of `shared`.
"""
