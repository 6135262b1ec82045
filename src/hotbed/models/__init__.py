"""The model zoo."""

from hotbed.models.dlrm import DLRM
from hotbed.models.wide_deep import WideDeep

MODELS = {"dlrm": DLRM, "wide-deep": WideDeep}
"""The models that the command line knows, by name."""

__all__ = ["DLRM", "MODELS", "WideDeep"]
