"""Why a model answered so: explanations computed from a bundle's own graphs, without PyTorch."""

from .explanation import Attention, Explanation, Lens, Likely, Target, Token, Watched
from .neurons import Factors
from .options import METHODS
from .tasks import explain

__all__ = [
    "METHODS",
    "Attention",
    "Explanation",
    "Factors",
    "Lens",
    "Likely",
    "Target",
    "Token",
    "Watched",
    "explain",
]
