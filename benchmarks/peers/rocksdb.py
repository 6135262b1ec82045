"""RocksDB by rocksdict, with the settings its own tuning guide gives for point look-ups on flash.

Keys are 8 bytes, values whole records. Files are read and written directly (no page cache), blocks
of 4 KiB are cached in a quarter of the memory, filters and indices with them. The log ahead of writes
is off: all contenders lose the newest rows when the process dies, and none calls fsync for a batch.
"""

from __future__ import annotations

import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.peers.keys import keys_of, read_in_parts


class RocksDb:
    name = "rocksdb"
    ages = 1.0

    def __init__(self, folder: Path, rows: int, record_bytes: int, memory: int) -> None:
        self.folder, self.record_bytes, self.memory = folder, record_bytes, memory
        self.threads = 1

    @staticmethod
    def lacks() -> str | None:
        if importlib.util.find_spec("rocksdict") is None:
            return "rocksdict is not installed (make peers)"
        return None

    def build(self) -> None:
        from rocksdict import (
            BlockBasedOptions,
            Cache,
            DBCompressionType,
            Options,
            Rdict,
            ReadOptions,
            WriteOptions,
        )

        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        options.set_compression_type(DBCompressionType.none())
        options.set_write_buffer_size(self.memory // 16)
        options.set_max_write_buffer_number(3)
        options.set_level_compaction_dynamic_level_bytes(True)
        options.set_max_background_jobs(4)
        options.set_max_open_files(-1)
        table = BlockBasedOptions()
        table.set_block_size(4096)
        table.set_bloom_filter(10, False)
        table.set_block_cache(Cache(self.memory // 4))
        table.set_cache_index_and_filter_blocks(True)
        table.set_pin_l0_filter_and_index_blocks_in_cache(True)
        options.set_block_based_table_factory(table)
        self.database = Rdict(str(self.folder), options)
        reading = ReadOptions()
        reading.set_async_io(True)
        self.database.set_read_options(reading)
        writing = WriteOptions()
        writing.disable_wal = True
        self.database.set_write_options(writing)
        self.writing = writing
        self.pool = ThreadPoolExecutor(64)

    def read(self, ids: np.ndarray) -> np.ndarray:
        return read_in_parts(ids, self.record_bytes, self.database.get, self.threads, self.pool)

    def write(self, ids: np.ndarray, records: np.ndarray) -> None:
        from rocksdict import WriteBatch

        batch = WriteBatch(raw_mode=True)
        for key, record in zip(keys_of(ids), records, strict=True):
            batch.put(key, record.tobytes())
        self.database.write(batch, self.writing)

    def allocate(self) -> None:
        for _ in range(600):
            pending = self.database.property_int_value("rocksdb.compaction-pending")
            running = self.database.property_int_value("rocksdb.num-running-compactions")
            flushing = self.database.property_int_value("rocksdb.num-running-flushes")
            if not pending and not running and not flushing:
                return
            time.sleep(0.1)

    def settings(self) -> str:
        return (
            f"direct reads and writes, {self.threads} reading threads (the best of those tried), "
            f"block cache {self.memory // 4 / 1e6:.0f} MB, memtables 3 x {self.memory // 16 / 1e6:.0f} "
            "MB, no compression, no write-ahead log"
        )
