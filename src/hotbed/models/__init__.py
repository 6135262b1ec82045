"""The model zoo."""

from hotbed.models.dlrm import DLRM
from hotbed.models.wide_deep import WideDeep

MODELS = {"dlrm": DLRM, "wide-deep": WideDeep}
"""The models that the command line knows, by name."""

__all__ = ["DLRM", "MODELS", "WideDeep"]


def __dir__() -> list[str]:
    """Only what is public, for completion."""
    return __all__
