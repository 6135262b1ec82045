"""The places in which kernels compute on rows, for `hotbed.places.moves`."""

from hotbed.places.device.place import bring, on_device, refuse_whole
from hotbed.places.tiered_device.place import place_on, refuse_tiered

__all__ = ["bring", "on_device", "place_on", "refuse_tiered", "refuse_whole"]
