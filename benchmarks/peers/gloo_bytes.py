"""As many bytes as Hotbed's ranks send each other, by all_to_all_single alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as torch_dist

from benchmarks.peers.hotbed_ranks import HotbedRanks


class GlooBytes:
    """Ids one way, rows back, and later gradients the first way; of a model that is built before it."""

    def __init__(self, model: HotbedRanks) -> None:
        self._model = model
        self.name = f"gloo, {model.how}-wise bytes"

    def nbytes(self) -> int:
        return 0

    def build(self) -> None:
        self.of_each = everyones(self._model.bytes_sent())
        self._messages = {what: self._message(what) for what in self.of_each[0]}

    def _message(self, what: str) -> Callable[[], None]:
        rank, world = torch_dist.get_rank(), torch_dist.get_world_size()
        each = [int(of_rank[what]) // max(1, world - 1) for of_rank in self.of_each]
        sent = [each[rank] if r != rank else 0 for r in range(world)]
        received = [each[r] if r != rank else 0 for r in range(world)]
        outgoing = torch.ones(sum(sent), dtype=torch.uint8)
        incoming = torch.ones(sum(received), dtype=torch.uint8)

        def run() -> None:
            torch_dist.all_to_all_single(incoming, outgoing, received, sent)

        return run

    def phases(self) -> Mapping[str, Callable[[int], object]]:
        return {"forward": self.look_up, "step": self.send_back}

    def look_up(self, i: int) -> None:
        self._messages["ids"]()
        self._messages["rows"]()

    def send_back(self, i: int) -> None:
        self._messages["gradients"]()

    def drop(self) -> None:
        self._messages = {}


def everyones(own: dict[str, float]) -> list[dict[str, float]]:
    """What each rank says."""
    told: list[dict[str, float]] = [{} for _ in range(torch_dist.get_world_size())]
    torch_dist.all_gather_object(told, own)
    return told
