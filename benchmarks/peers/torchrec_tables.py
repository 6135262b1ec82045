"""TorchRec's ShardedEmbeddingBagCollection on CPUs over Gloo, FBGEMM's optimizer fused into backward."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from benchmarks.peers.fbgemm import EPS, OPTIMIZERS
from benchmarks.workload import Workload


class TorchRec:
    """`how`: ``"table"``, ``"row"`` or ``"column"``, all of them."""

    def __init__(self, workload: Workload, optimizer: str, lr: float, how: str) -> None:
        self.workload, self.optimizer, self.lr, self.how = workload, optimizer, lr, how
        self.name = f"torchrec, {how}-wise"

    @staticmethod
    def lacks(optimizer: str) -> str | None:
        if importlib.util.find_spec("torchrec") is None:
            return "torchrec is not installed (make peers)"
        return None if optimizer in OPTIMIZERS else f"FBGEMM has no {optimizer} on the CPU"

    def nbytes(self) -> int:
        return self.workload.table_bytes(self.optimizer)

    def build(self) -> None:
        logging.getLogger("torchrec").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._build()

    def _build(self) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.sharding_plan import (
            column_wise,
            construct_module_sharding_plan,
            row_wise,
            table_wise,
        )
        from torchrec.distributed.types import ShardingEnv, ShardingPlan

        work, world = self.workload, torch_dist.get_world_size()
        host = torch.device("cpu")
        collection = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"t{t}",
                    embedding_dim=work.dim,
                    num_embeddings=work.rows,
                    feature_names=[f"f{t}"],
                )
                for t in range(work.tables)
            ],
            device=torch.device("meta"),
        )
        sharder = EmbeddingBagCollectionSharder(
            fused_params={
                "optimizer": EmbOptimType[OPTIMIZERS[self.optimizer]],
                "learning_rate": self.lr,
                "eps": EPS,
            }
        )
        fused = {"compute_kernel": "fused"}
        cut: dict[str, Callable[[int], Any]] = {
            "table": lambda t: table_wise(rank=t * world // work.tables, **fused),
            "row": lambda t: row_wise(**fused),
            "column": lambda t: column_wise(ranks=list(range(world)), **fused),
        }
        plan = construct_module_sharding_plan(
            collection,
            per_param_sharding={f"t{t}": cut[self.how](t) for t in range(work.tables)},
            sharder=sharder,
            world_size=world,
            local_size=world,
            device_type="cpu",
        )
        parallel = DistributedModelParallel(
            nn.ModuleDict({"tables": collection}),
            env=ShardingEnv.from_process_group(torch_dist.group.WORLD),
            device=host,
            plan=ShardingPlan(plan={"tables": plan}),
            sharders=[sharder],
        )
        self.tables = parallel.module["tables"]
        for t, (row, column), shard in self.own_shards():
            whole = work.initial_weights(t)
            shard.copy_(whole[row : row + len(shard), column : column + shard.shape[1]])
        self.batches = [
            KeyedJaggedTensor(
                keys=[f"f{t}" for t in range(work.tables)],
                values=torch.from_numpy(batch.reshape(-1)),
                lengths=torch.full((work.tables * work.batch,), work.bag),
            )
            for batch in work.ids
        ]
        self.gradient = work.output_gradient()

    def own_shards(self) -> Iterator[tuple[int, Sequence[int], Tensor]]:
        """Of each table that this rank keeps a part of: its number, the part's first row and column, and the
        part."""
        for name, table in self.tables.state_dict().items():
            for shard in table.local_shards():
                t = int(name.split(".")[1].removeprefix("t"))
                yield t, shard.metadata.shard_offsets, shard.tensor

    def phases(self) -> Mapping[str, Callable[[int], object]]:
        return {"forward": self.look_up, "backward": self.send_back}

    def look_up(self, i: int) -> None:
        found: Any = self.tables(self.batches[i % len(self.batches)])
        self.vectors = found.values()  # waits for them

    def send_back(self, i: int) -> None:
        self.vectors.backward(self.gradient)

    def drop(self) -> None:
        self.tables = self.vectors = self.gradient = None
        self.batches = []
