// hotbed._core.RowLog: the log of rows on SSD, for tests, measurements and `hotbed inspect`.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <optional>
#include <random>
#include <string>
#include <tuple>

#include "bindings/bindings.hpp"
#include "log/row_log.hpp"

using namespace hotbed;

namespace {

using Matrix = nb::shape<-1, -1>;
using Tables = Array<const int32_t, Vector>;
using Ids = Array<const int64_t, Vector>;

// (number, name, rows or None for any ids)
using Table = std::tuple<int32_t, std::string, std::optional<int64_t>>;
using Store = std::tuple<int64_t, std::vector<Table>>;

std::vector<RowKey> keys_of(const Tables& tables, const Ids& ids) {
  if (tables.shape(0) != ids.shape(0)) throw nb::value_error("as many tables as ids are needed");
  std::vector<RowKey> keys(ids.shape(0));
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = {ids.data()[i], tables.data()[i]};
  return keys;
}

void check_records(const LogTier& tier, size_t keys, size_t rows, size_t bytes) {
  if (rows != keys || bytes != static_cast<size_t>(tier.record_bytes())) {
    throw nb::value_error("records must be (keys, bytes of a record)");
  }
}

IoOptions io_options(const std::string& backend, unsigned depth, unsigned threads, bool direct,
                     std::shared_ptr<IoObserver> observer) {
  IoOptions io;
  io.backend = io_backend_named(backend);
  io.depth = depth;
  io.threads = threads;
  io.direct = direct;
  io.observer = std::move(observer);
  return io;
}

std::unique_ptr<RowLog> create(const std::string& path, const std::vector<Store>& stores,
                               uint64_t segment_bytes, double space_ratio, uint64_t append_bytes,
                               bool background, bool preallocate, bool reset,
                               const std::string& backend, unsigned depth, unsigned threads,
                               bool direct, std::shared_ptr<IoObserver> observer) {
  std::vector<LogStore> described;
  for (const auto& [record_bytes, tables] : stores) {
    LogStore store{record_bytes, {}};
    for (const auto& [number, name, rows] : tables) {
      store.tables.push_back({number, name, rows.value_or(-1)});
    }
    described.push_back(std::move(store));
  }
  LogOptions options;
  options.segment_bytes = segment_bytes;
  options.space_ratio = space_ratio;
  options.append_bytes = append_bytes;
  options.background = background;
  options.preallocate = preallocate;
  options.reset = reset;
  options.io = io_options(backend, depth, threads, direct, std::move(observer));
  return RowLog::create(path, std::move(described), std::move(options));
}

std::vector<Store> stores_of(const RowLog& log) {
  std::vector<Store> stores;
  for (const LogStore& store : log.manifest().stores) {
    std::vector<Table> tables;
    for (const LogTable& t : store.tables) {
      tables.emplace_back(t.table, t.name,
                          t.rows < 0 ? std::nullopt : std::optional<int64_t>(t.rows));
    }
    stores.emplace_back(store.record_bytes, std::move(tables));
  }
  return stores;
}

nb::dict as_dict(const StoreStatistics& s) {
  nb::dict d;
  d["rows_read"] = s.rows_read;
  d["rows_from_memory"] = s.rows_from_memory;
  d["blocks_read"] = s.blocks_read;
  d["requests"] = s.requests;
  d["rereads"] = s.rereads;
  d["rows_written"] = s.rows_written;
  d["rows_moved"] = s.rows_moved;
  d["compactions"] = s.compactions;
  d["stalls"] = s.stalls;
  d["live_records"] = s.live_records;
  d["dead_records"] = s.dead_records;
  d["segments"] = s.segments;
  d["bytes"] = s.bytes;
  d["live_bytes"] = s.live_bytes;
  d["damaged_segments"] = s.damaged_segments;
  d["compaction_failure"] = s.compaction_failure;
  return d;
}

nb::dict statistics(const RowLog& log) {
  LogStatistics s = log.statistics();
  nb::list stores;
  for (const StoreStatistics& store : s.stores) stores.append(as_dict(store));
  nb::dict d;
  d["backend"] = s.io.backend;
  d["threads"] = s.io.threads;
  d["direct"] = s.io.buffered_files == 0;
  d["registered_memory"] = s.io.registered_memory;
  d["reads"] = s.io.reads;
  d["writes"] = s.io.writes;
  d["bytes_read"] = s.io.bytes_read;
  d["bytes_written"] = s.io.bytes_written;
  d["retries"] = s.io.retries;
  d["errors"] = s.io.errors;
  d["syncs"] = s.io.syncs;
  d["queue_depth"] = s.io.deepest;
  d["buffer_waits"] = s.writer.waits;
  d["buffers_in_flight"] = s.writer.in_flight;
  d["buffers_failed"] = s.writer.failed;
  d["memory_bytes"] = s.memory_bytes;
  d["stores"] = stores;
  return d;
}

nb::list recovery(const RowLog& log) {
  nb::list stores;
  for (const RecoveryReport& r : log.recovery()) {
    nb::list blocks;
    for (const DroppedBlock& b : r.dropped_blocks) {
      nb::dict block;
      block["path"] = b.path;
      block["offset"] = b.offset;
      block["reason"] = b.reason;
      blocks.append(block);
    }
    nb::dict d;
    d["segments"] = r.segments;
    d["blocks"] = r.blocks;
    d["records"] = r.records;
    d["superseded"] = r.superseded;
    d["erasures"] = r.erasures;
    d["dropped"] = r.dropped;
    d["dropped_blocks"] = blocks;
    stores.append(d);
  }
  return stores;
}

// Seconds that `count` reads of `bytes` bytes at random places of files of equal size take, `depth`
// at a time: what the disk itself can do.
double random_reads(const std::vector<std::string>& paths, uint32_t bytes, uint64_t count,
                    unsigned depth, const std::string& backend, uint64_t seed) {
  IoEngine engine(io_options(backend, depth, depth, true, nullptr));
  std::vector<std::shared_ptr<IoFile>> files;
  for (const std::string& path : paths) files.push_back(engine.open(path));
  uint64_t places = files.empty() || bytes == 0 ? 0 : files[0]->size() / bytes;
  auto queue = engine.lease();
  if (bytes % kBlockUnit || places == 0 || depth * uint64_t{bytes} > queue->arena_bytes()) {
    throw std::invalid_argument("random_reads: no such reads in these files");
  }
  std::mt19937_64 random(seed);
  std::vector<Completion> done;
  std::vector<uint64_t> free_slots;
  for (uint64_t slot = 0; slot < depth; ++slot) free_slots.push_back(slot);
  auto start = std::chrono::steady_clock::now();
  for (uint64_t begun = 0, ended = 0; ended < count; ended += done.size()) {
    for (; begun < count && !free_slots.empty(); ++begun) {
      uint64_t slot = free_slots.back();
      free_slots.pop_back();
      const IoFile* file = files[random() % files.size()].get();
      queue->submit(
          {file, random() % places * bytes, queue->arena() + slot * bytes, bytes, false, slot});
    }
    done.clear();
    queue->collect(begun < count ? (depth + 3) / 4 : queue->in_flight(), done);
    for (Completion completion : done) {
      if (completion.error) throw IoError("reading", paths[0], 0, bytes, completion.error);
      free_slots.push_back(completion.tag);
    }
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

void bind_log(nb::module_& module) {
  nb::class_<IoObserver>(module, "IoObserver", "Watches what a log does to files.");

  nb::class_<RowLog>(
      module, "RowLog",
      "csrc/log/row_log.hpp. Keys are arrays of table numbers (int32) and ids (int64), "
      "records (keys, record bytes) of uint8, found (keys,) of bool. Thread-safe.")
      .def_static("create", &create, "path"_a, "stores"_a, "segment_bytes"_a = uint64_t{64} << 20,
                  "space_ratio"_a = 1.5, "append_bytes"_a = uint64_t{8} << 20,
                  "background"_a = true, "preallocate"_a = true, "reset"_a = false,
                  "backend"_a = "auto", "depth"_a = 128, "threads"_a = 32, "direct"_a = true,
                  "observer"_a.none() = nullptr,
                  "stores: [(record bytes, [(table number, name, rows or None)])]")
      .def_static(
          "open_to_read",
          [](const std::string& path, const std::string& backend, bool locked) {
            nb::gil_scoped_release without;
            return RowLog::open_to_read(path, io_options(backend, 128, 32, true, nullptr), locked);
          },
          "path"_a, "backend"_a = "auto", "locked"_a = true,
          "`locked`: whether others might change it.")
      .def_prop_ro("path", &RowLog::path)
      .def_prop_ro("stores", &stores_of)
      .def(
          "read",
          [](RowLog& log, size_t store, Tables tables, Ids ids, Array<uint8_t, Matrix> records,
             Array<bool, Vector> found) {
            LogTier& tier = log.tier(store);
            check_records(tier, ids.shape(0), records.shape(0), records.shape(1));
            if (found.shape(0) != ids.shape(0)) throw nb::value_error("found must be (keys,)");
            nb::gil_scoped_release without;
            tier.read(keys_of(tables, ids), records.data(), found.data());
          },
          "store"_a, "tables"_a, "ids"_a, "records"_a, "found"_a)
      .def(
          "write",
          [](RowLog& log, size_t store, Tables tables, Ids ids,
             Array<const uint8_t, Matrix> records) {
            LogTier& tier = log.tier(store);
            check_records(tier, ids.shape(0), records.shape(0), records.shape(1));
            nb::gil_scoped_release without;
            tier.write(keys_of(tables, ids), records.data());
          },
          "store"_a, "tables"_a, "ids"_a, "records"_a, "Keys must be distinct.")
      .def(
          "erase",
          [](RowLog& log, size_t store, Tables tables, Ids ids) {
            LogTier& tier = log.tier(store);
            nb::gil_scoped_release without;
            tier.erase(keys_of(tables, ids));
          },
          "store"_a, "tables"_a, "ids"_a)
      .def(
          "rows",
          [](RowLog& log, size_t store, int32_t table) { return log.tier(store).rows(table); },
          "store"_a, "table"_a)
      .def(
          "ids",
          [](RowLog& log, size_t store, int32_t table, Array<int64_t, Vector> out) {
            LogTier& tier = log.tier(store);
            if (static_cast<int64_t>(out.shape(0)) != tier.rows(table)) {
              throw nb::value_error("out must be (rows,)");
            }
            tier.ids(table, out.data());
          },
          "store"_a, "table"_a, "out"_a, "Writes the ids of a table, rising.")
      .def(
          "compact_step", [](RowLog& log, size_t store) { return log.tier(store).compact_step(); },
          "store"_a, Unlocked())
      .def("flush", &RowLog::flush, Unlocked())
      .def("sync", &RowLog::sync, Unlocked())
      .def("close", &RowLog::close, Unlocked())
      .def("statistics", &statistics)
      .def("recovery", &recovery, "By store; empty for a log that is written.");

  module.def("io_uring_works", &ring_works);
  module.def("random_reads", &random_reads, "paths"_a, "nbytes"_a, "count"_a, "depth"_a,
             "backend"_a = "auto", "seed"_a = 0, Unlocked(),
             "Seconds for so many direct reads at random places of files of equal size.");
}
