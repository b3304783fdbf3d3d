"""Weights from where a trainer has them, in the layout that `LLM.set_weights` takes, without leaving the devices."""

from quire.weights.comparison import Comparison, compare
from quire.weights.huggingface import from_huggingface
from quire.weights.maxtext import from_maxtext
from quire.weights.tunix import from_tunix

__all__ = ["Comparison", "compare", "from_huggingface", "from_maxtext", "from_tunix"]
