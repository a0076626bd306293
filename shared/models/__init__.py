"""Models: loading one by name, finding out whether and in what shape an engine can run it.

May import `shared.engine`.
"""

from .loading import LoadedModel, load_model
from .probe import UnsupportedModel, inspect_model

__all__ = ["LoadedModel", "UnsupportedModel", "inspect_model", "load_model"]
