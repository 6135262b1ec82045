"""Errors that requests are answered with."""

from __future__ import annotations

from hotbed.errors import HotbedError

__all__ = ["RequestError", "busy", "wrong"]


class RequestError(HotbedError):
    """A request cannot be answered.

    Attributes:
        status: of HTTP.
        retry_after: seconds after which it may be asked again.
    """

    def __init__(self, status: int, text: str, retry_after: int | None = None) -> None:
        super().__init__(text)
        self.status, self.retry_after = status, retry_after


def wrong(field: str, text: str) -> RequestError:
    """Return the error of an input that is not as the signature says."""
    return RequestError(400, f"{field}: {text}")


def busy(text: str, seconds: float) -> RequestError:
    """Return the error of a server that has too much to do."""
    return RequestError(503, text, retry_after=max(1, round(seconds)))
