"""The lab: the stages' own bookkeeping, run without a model, in a browser or here."""
