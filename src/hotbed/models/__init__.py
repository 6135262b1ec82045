"""The model zoo."""

from torch import nn

from hotbed.models.dcn import DCN, DCNv1
from hotbed.models.deepfm import DeepFM, XDeepFM
from hotbed.models.dlrm import DLRM
from hotbed.models.pnn import PNN
from hotbed.models.wide_deep import WideDeep

MODELS: dict[str, type[nn.Module]] = {
    "dlrm": DLRM,
    "wide-deep": WideDeep,
    "dcn": DCN,
    "dcn-v1": DCNv1,
    "deepfm": DeepFM,
    "xdeepfm": XDeepFM,
    "pnn": PNN,
}
"""The models that the command line knows, by name."""

__all__ = ["DCN", "DCNv1", "DLRM", "MODELS", "PNN", "DeepFM", "WideDeep", "XDeepFM"]


def __dir__() -> list[str]:
    """Only what is public, for completion."""
    return __all__
