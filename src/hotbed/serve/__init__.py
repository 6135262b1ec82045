"""Models that answer requests, from bundles that need neither torch nor Hotbed; see docs/serving.md."""

from hotbed.serve.bundles.bundle import BundleError, ExportError
from hotbed.serve.bundles.versions import Version, pin, unpin, versions_of
from hotbed.serve.exporting.export import export
from hotbed.serve.following.follower import Applied, Follower, follow
from hotbed.serve.quantized import quantized

__all__ = [
    "Applied",
    "BundleError",
    "ExportError",
    "Follower",
    "Version",
    "export",
    "follow",
    "pin",
    "quantized",
    "unpin",
    "versions_of",
]
