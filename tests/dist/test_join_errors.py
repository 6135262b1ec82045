"""Errors that end a rank inside of Join, as those hear of them that have ended before."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from dist.test_distribute import loss_of as loss_of_model
from dist.test_distribute import made
from dist.test_sharded import batch_of, collection, loss_of, plan_of
from dist.worlds import run
from torch.distributed.algorithms.join import Join

import hotbed as hb
from hotbed.dist import PeerError


def ended_by(rank: int, world: int, how: str, dense: bool, folder: str) -> None:
    model: Any = made() if dense else collection()
    hb.distribute(model, "basic" if dense else plan_of(model, "row", world), timeout=20)
    optimizer = hb.optim.SGD(model.parameters(), lr=0.1)
    try:
        with Join(hb.dist.joinables(model)):
            torch.distributed.barrier()  # nobody is gone before all are connected
            for number in range(0 if rank == 0 and how == "no batch" else 1 + 2 * rank):
                batch = batch_of(number, slice(4))
                if how == "no batch":
                    os._exit(1)
                if number == 2 and how == "a wrong id":
                    batch["item"] = torch.full((4, 2), 61)
                elif number == 2:
                    os.kill(os.getpid(), signal.SIGKILL)
                (loss_of_model(model, batch) if dense else loss_of(model(batch), 1)).backward()
                optimizer.step()
                optimizer.zero_grad()
    except PeerError as error:
        Path(folder, str(rank)).write_text(str(error))
    except hb.IdError:
        pass
    os._exit(1)  # as a script that raises ends


@pytest.mark.process
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("a wrong id", "Rank 1 could not go on: IdError"),
        ("killed", "steps have left them"),
        ("no batch", "steps have left them"),
    ],
)
def test_ranks_that_have_ended_hear_what_ends_another(
    how: str, text: str, dense: bool, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError, match="is gone"):
        run(2, ended_by, how, dense, str(tmp_path))
    assert text in (tmp_path / "0").read_text()
