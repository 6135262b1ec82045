// Tiers for Python.
#include "storage/storage.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <omp.h>

#include <atomic>
#include <utility>

#include "base/folder_lock.hpp"
#include "batch/claim.hpp"
#include "bindings/bindings.hpp"
#include "log/row_log.hpp"
#include "storage/log_layouts.hpp"

using namespace hotbed;

namespace {

nb::typed<nb::dict, nb::str, double> counters_of(const Storage& storage) {
  TierCounters total;
  TierTraffic host, lowest;
  {
    nb::gil_scoped_release unlocked;
    host = storage.host_traffic();
    lowest = storage.lowest_traffic();
    for (const auto& space : storage.spaces()) {
      TierCounters one = space->counters();
      total.used += one.used;
      total.missed += one.missed;
      total.created += one.created;
      total.written_back += one.written_back;
      total.evicted += one.evicted;
      total.scratch_reads += one.scratch_reads;
      total.move_ns += one.move_ns;
      total.waited_ns += one.waited_ns;
      total.batches = std::max(total.batches, one.batches);
      total.batches_ahead = std::max(total.batches_ahead, one.batches_ahead);
    }
  }
  nb::typed<nb::dict, nb::str, double> all;
  all["rows_used"] = total.used;
  all["rows_missed"] = total.missed;
  all["rows_created"] = total.created;
  all["rows_written_back"] = total.written_back;
  all["rows_evicted"] = total.evicted;
  all["rows_read_past"] = total.scratch_reads;
  all["rows_from_host"] = host.rows_read;
  all["rows_to_host"] = host.rows_written;
  all["rows_from_ssd"] = lowest.rows_read;
  all["rows_to_ssd"] = lowest.rows_written;
  all["move_ms"] = static_cast<double>(total.move_ns) / 1e6;
  all["wait_ms"] = static_cast<double>(total.waited_ns) / 1e6;
  all["batches"] = total.batches;
  all["batches_prepared"] = total.batches_ahead;
  return all;
}

}  // namespace

nb::typed<nb::dict, nb::str, int64_t> by_part(const BudgetParts& parts) {
  nb::typed<nb::dict, nb::str, int64_t> all;
  all["rows"] = parts.rows;
  all["other_rows"] = parts.other_rows;
  all["bookkeeping"] = parts.bookkeeping;
  all["moving"] = parts.moving;
  all["buffers"] = parts.buffers;
  all["index"] = parts.index;
  all["announced"] = parts.announced;
  all["total"] = parts.total();
  return all;
}

void bind_storage(nb::module_& module) {
  module.def(
      "use_one_thread", [] { omp_set_num_threads(1); },
      "Regions that this thread opens from now on are not parallel.");
  module.def(
      "spin_less",
      [](int threads) {
        // libgomp's threads spin for up to milliseconds before they sleep, unless there are more of
        // them than cores. A team that only waits makes them more; it goes with its thread.
        int more = omp_get_num_procs() + 2 - threads;
        if (more > 2) return false;  // cores are left
        nb::gil_scoped_release unlocked;
        std::atomic<int> there{0};
#pragma omp parallel num_threads(2)
        ++there;
        return there > 1;
      },
      "threads"_a,
      "While the calling thread lives, threads of parallel regions, of which there are `threads`, "
      "give their core away early where others need it. Whether that was done.");

  nb::class_<Storage>(module, "Storage", "The tiers of one collection.")
      .def_static(
          "make",
          [](uint64_t compute, uint64_t host, std::optional<std::string> ssd, double space_ratio,
             uint64_t segment_bytes, std::shared_ptr<IoObserver> observer) {
            MakeLowest lowest = [](const std::vector<RecordGroup>& groups) {
              return std::vector<std::shared_ptr<Tier>>(groups.size());
            };
            if (ssd) {
              uint64_t of_logs = host ? host : compute;
              lowest = LogLayouts{*ssd, of_logs, space_ratio, segment_bytes, observer};
            }
            return std::make_shared<Storage>(StorageBudgets{compute, host}, std::move(lowest));
          },
          "compute"_a, "host"_a, "ssd"_a.none(), "space_ratio"_a,
          "segment_bytes"_a = LogOptions{}.segment_bytes, "observer"_a.none() = nullptr)
      .def(
          "lay_out",
          [](Storage& storage, const std::vector<std::shared_ptr<Table>>& tables, bool again) {
            nb::gil_scoped_release unlocked;
            storage.lay_out(tables, again);
          },
          "tables"_a, "again"_a = false, "Gives every table a place where rows of its layout lie.")
      .def("retract",
           [](Storage& storage) {
             nb::gil_scoped_release unlocked;
             for (const auto& space : storage.spaces()) space->retract_all();
           })
      .def("flush", &Storage::flush, Unlocked())
      .def("link", &Storage::link, "folder"_a, Unlocked(),
           "Writes rows to the SSD, and links its files into a folder that is not there yet. "
           "Whether "
           "there is an SSD.")
      .def("adopt", &Storage::adopt, "folder"_a, Unlocked(),
           "Has rows be those of such a folder, where all are first values. False: that cannot be.")
      .def(
          "place_of",
          [](const Storage& storage, const Table& table) {
            return std::make_tuple(storage.store_of(table), table.number(),
                                   storage.rows_below(table));
          },
          "table"_a, "(number of its store, its number there, rows) in such a folder.")
      .def("counters", &counters_of)
      .def(
          "compute_budget_for",
          [](const Storage& storage, const std::vector<std::pair<Address, int64_t>>& needs,
             std::optional<int64_t> ahead) {
            std::vector<OverBudget::Need> all;
            for (auto [space, slots] : needs) {
              all.push_back({pointer<const RowSpace>(space), slots});
            }
            BudgetParts parts;
            {
              nb::gil_scoped_release unlocked;
              parts = ahead ? storage.compute_budget_for_stream(all, *ahead)
                            : storage.compute_budget_for(all);
            }
            return by_part(parts);
          },
          "needs"_a, "ahead"_a.none() = nb::none(),
          "The least budget that meets StorageError.needs, by part; with `ahead` one for a stream "
          "like that of so far, of which so many batches are brought up ahead.")
      .def(
          "pinned",
          [](const Storage& storage) {
            nb::gil_scoped_release unlocked;
            std::vector<int64_t> all;
            for (const auto& space : storage.spaces()) all.push_back(space->pinned());
            return all;
          },
          "Slots that batches hold, of each row space.")
      .def("capacities",
           [](const Storage& storage) {
             std::vector<int64_t> all;
             for (const auto& space : storage.spaces()) all.push_back(space->limit());
             return all;
           })
      .def_prop_ro(
          "memory_bytes", [](const Storage& storage) { return storage.memory_bytes(); }, Unlocked())
      .def(
          "memory_bytes_of",
          [](const Storage& storage, const Table& table) { return storage.memory_bytes(table); },
          "table"_a, nb::call_guard<nb::gil_scoped_release>(),
          "The part of memory_bytes of one table, by the bytes of rows.");

  module.def(
      "required_budget",
      [](const std::vector<std::shared_ptr<Table>>& tables, const std::vector<int64_t>& rows,
         int64_t batches, bool ssd) {
        BudgetParts parts;
        {
          nb::gil_scoped_release unlocked;
          parts = required_budget(tables, rows, batches, ssd);
        }
        return by_part(parts);
      },
      "tables"_a, "rows"_a, "batches"_a, "ssd"_a,
      "The least budget that holds so many batches at once, of so many rows of each table, by "
      "part.");

  nb::class_<FolderLock>(module, "FolderLock",
                         "A folder locked by a file in it, until this goes or the process ends; "
                         "forked children have no part in it.")
      .def(nb::init<const std::string&, const std::string&, bool, const std::string&,
                    const std::string&>(),
           "folder"_a, "name"_a, "shared"_a, "what"_a, "remedy"_a)
      .def_prop_ro("inherited", &FolderLock::inherited,
                   "Whether the process that made it is the one from which this was forked.");
  module.attr("MOST_RECORD_BYTES") = kMostRecordBytes;
  module.attr("MOST_RECORD_SIZES") = kMostStores;
  module.def("holds_log", &holds_log, "path"_a, "Whether a folder has the manifest of a log.");
  module.def("discard_log", &discard_log, "path"_a,
             "Removes the files of a log, and its folder unless something else is in it: the names "
             "of that.");

  nb::class_<Claim>(module, "Claim", "Keeps the rows of a batch in their slots while it lives.")
      .def("mark_dirty", &Claim::mark_dirty, "All its rows were written.");
}
