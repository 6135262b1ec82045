"""The errors Hotbed raises."""


class HotbedError(Exception):
    """The root of every error that Hotbed raises on purpose."""
