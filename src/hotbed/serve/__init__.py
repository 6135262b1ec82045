"""Models that answer requests, from bundles that need neither torch nor Hotbed; see docs/serving.md."""

from hotbed.serve.bundle import BundleError, ExportError
from hotbed.serve.exporting import export
from hotbed.serve.quantized import quantized

__all__ = ["BundleError", "ExportError", "export", "quantized"]
