"""Models that answer requests, from bundles that need neither torch nor Hotbed; see docs/serving.md."""

from hotbed.serve.bundle import BundleError, ExportError
from hotbed.serve.exporting import export
from hotbed.serve.following import Applied, Follower, follow
from hotbed.serve.quantized import quantized
from hotbed.serve.versions import Version, pin, unpin, versions_of

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
