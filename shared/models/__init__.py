"""Models: loading one by name, finding out whether and in what shape an engine can run it.

May import `shared.engine`.
"""

from .loading import LoadedModel, load_model
from .probe import UnsupportedModel, attention_set_to, inspect_model

__all__ = ["LoadedModel", "UnsupportedModel", "attention_set_to", "inspect_model", "load_model"]
