"""The model zoo."""

from hotbed.models.autoint import AutoInt, AutoIntSettings
from hotbed.models.click import ClickModel
from hotbed.models.dcn import DCN, DCNSettings, DCNv1
from hotbed.models.deepfm import DeepFM, DeepFMSettings, XDeepFM, XDeepFMSettings
from hotbed.models.din import DIN, DINSettings
from hotbed.models.dlrm import DLRM, DLRMSettings
from hotbed.models.final_mlp import FinalMLP, FinalMLPSettings
from hotbed.models.item_index import Found, ItemIndex
from hotbed.models.mmoe import MMoE, MMoESettings
from hotbed.models.pnn import PNN, PNNSettings
from hotbed.models.registry import MODELS, register
from hotbed.models.settings import LinearSettings, ModelSettings
from hotbed.models.two_tower import TwoTower, TwoTowerSettings
from hotbed.models.wide_deep import WideDeep, WideDeepSettings

__all__ = [
    "AutoInt",
    "AutoIntSettings",
    "ClickModel",
    "DCN",
    "DCNSettings",
    "DCNv1",
    "DIN",
    "DINSettings",
    "DLRM",
    "DLRMSettings",
    "DeepFM",
    "DeepFMSettings",
    "FinalMLP",
    "FinalMLPSettings",
    "Found",
    "ItemIndex",
    "LinearSettings",
    "MMoE",
    "MMoESettings",
    "MODELS",
    "ModelSettings",
    "PNN",
    "PNNSettings",
    "TwoTower",
    "TwoTowerSettings",
    "WideDeep",
    "WideDeepSettings",
    "XDeepFM",
    "XDeepFMSettings",
    "register",
]


def __dir__() -> list[str]:
    """Only what is public, for completion."""
    return __all__
