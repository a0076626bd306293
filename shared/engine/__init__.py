"""What every engine is made of and no stage is about: requests, sampling, text, step records.

Imports no other room.
"""
