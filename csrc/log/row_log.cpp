// The folder of a log: lock, manifest, syncing, the thread that compacts.
#include "log/row_log.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include "log/row_log_core.hpp"

namespace hotbed {

namespace {

constexpr const char* kLock = "lock";
constexpr const char* kUnfinished = ".new";  // behind the manifest's name while it is written

bool is_file(const std::string& path) {
  std::error_code error;  // a link is none
  return std::filesystem::symlink_status(path, error).type() == std::filesystem::file_type::regular;
}

std::unique_ptr<FolderLock> lock_folder(const std::string& path, bool shared) {
  return std::make_unique<FolderLock>(path, kLock, shared, "The row log " + path,
                                      "Wait for it to end, or take another folder.");
}

// Removes the files of a log but its lock; the manifest last, by which they are known as a log's.
void remove_files(const std::string& folder) {
  auto remove = [&](const std::string& path) {
    std::error_code error;
    std::filesystem::remove(path, error);
    if (error) throw TierError("Discarding the row log: " + path + ": " + error.message(), path);
  };
  for (const auto& [store, files] : segment_files_in(folder)) {
    for (const auto& file : files) remove(file.second);
  }
  std::string manifest = folder + "/" + kManifest;
  if (std::string unfinished = manifest + kUnfinished; is_file(unfinished)) remove(unfinished);
  remove(manifest);
}

uint64_t buffer_bytes_of(const Manifest& manifest, uint64_t bytes) {
  for (const LogStore& store : manifest.stores) {
    bytes = std::max<uint64_t>(bytes, BlockLayout(store.record_bytes).block_bytes);
  }
  return std::min(bytes, manifest.segment_bytes);
}

void check_options(const LogOptions& options) {
  if (!(options.space_ratio >= kLeastSpaceRatio)) {
    throw std::invalid_argument("A row log with a space ratio of " +
                                std::to_string(options.space_ratio) +
                                " would do little else than move rows; give at least " +
                                std::to_string(kLeastSpaceRatio) + ".");
  }
}

}  // namespace

std::map<size_t, SegmentFiles> segment_files_in(const std::string& folder) {
  std::map<size_t, SegmentFiles> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    size_t store;
    uint64_t number;
    if (parse_segment_name(entry.path().filename().string(), &store, &number) &&
        is_file(entry.path().string())) {
      found[store].emplace_back(number, entry.path().string());
    }
  }
  for (auto& [store, files] : found) std::sort(files.begin(), files.end());
  return found;
}

Manifest read_manifest(const std::string& folder) {
  std::string path = folder + "/" + kManifest;
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw TierError("The folder " + folder + " holds no row log: there is no file " + path + ".",
                    folder);
  }
  std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(file), {}};
  return decode(bytes, path);
}

TierError tier_error(const IoError& error) {
  std::string remedy = error.code == ENOSPC || error.code == EDQUOT
                           ? ". The disk is full: make space, or give the log another folder."
                           : ".";
  TierError told(error.what() + remedy, error.path, error.bytes);
  told.code = error.code;
  return told;
}

// --- The core. ---

RowLogCore::RowLogCore(std::string path, std::unique_ptr<FolderLock> lock, Manifest manifest,
                       LogOptions options)
    : path_(std::move(path)),
      process_(getpid()),
      lock_(std::move(lock)),
      manifest_(std::move(manifest)),
      options_(std::move(options)),
      engine_(options_.io) {
  uint64_t buffer_bytes = buffer_bytes_of(manifest_, options_.buffer_bytes);
  uint64_t buffers =
      LogWriter::buffers(options_.append_bytes, buffer_bytes, manifest_.stores.size());
  writer_ = std::make_unique<LogWriter>(engine_, buffer_bytes, static_cast<unsigned>(buffers));
  for (size_t s = 0; s < manifest_.stores.size(); ++s) {
    tiers_.push_back(std::make_unique<LogTier>(*this, s, manifest_.stores[s]));
  }
  try {
    engine_.replace(path_ + "/" + kManifest, encode(manifest_));
  } catch (const IoError& error) {
    throw tier_error(error);
  }
  if (options_.background) compaction_ = std::thread([this] { compact(); });
}

RowLogCore::RowLogCore(std::string path, std::unique_ptr<FolderLock> lock, Manifest manifest,
                       IoOptions io)
    : path_(std::move(path)),
      process_(getpid()),
      lock_(std::move(lock)),
      manifest_(std::move(manifest)),
      engine_(std::move(io)) {
  auto files = segment_files_in(path_);
  try {
    for (size_t s = 0; s < manifest_.stores.size(); ++s) {
      tiers_.push_back(std::make_unique<LogTier>(*this, s, manifest_.stores[s]));
      recovery_.emplace_back();
      const auto* linked = manifest_.linked ? &manifest_.linked->at(s) : nullptr;
      tiers_.back()->recover(files[s], linked, recovery_.back());
    }
  } catch (const IoError& error) {
    throw tier_error(error);
  }
}

RowLogCore::~RowLogCore() {
  try {
    close();
  } catch (const std::exception&) {
    // Whoever wants to know calls close().
  }
  // The writer's thread calls into the tiers, whose buffers go back to the writer.
  if (writer_) writer_->stop();
  tiers_.clear();
}

void RowLogCore::check_readable() const {
  if (getpid() != process_) {
    throw TierError("The row log " + path_ + " belongs to process " + std::to_string(process_) +
                        ", from which this one was forked. Open another log here.",
                    path_);
  }
  if (closed_) throw TierError("The row log " + path_ + " is closed.", path_);
}

void RowLogCore::check_writable() const {
  check_readable();
  if (!writer_) throw TierError("The row log " + path_ + " was opened to read.", path_);
}

void RowLogCore::flush() {
  check_writable();
  for (auto& tier : tiers_) tier->seal_for_sync();
  writer_->wait();
}

void RowLogCore::sync() {
  flush();
  std::lock_guard syncing(sync_mutex_);
  if (sync_failed_) {
    throw TierError("The row log " + path_ +
                        ": an earlier sync failed, so nobody can tell what is on the disk. Go back "
                        "to a checkpoint.",
                    path_);
  }
  try {
    for (auto& tier : tiers_) {
      for (const auto& segment : tier->take_unsynced()) engine_.sync(*segment->file);
    }
    if (names_changed_.exchange(false)) engine_.sync_directory(path_);
  } catch (const IoError& error) {
    sync_failed_ = true;
    throw tier_error(error);
  }
}

void RowLogCore::stop() {
  {
    std::lock_guard lock(compaction_mutex_);
    stopping_ = true;
  }
  compaction_wanted_.notify_all();
  for (auto& tier : tiers_) tier->space_.notify_all();
  if (compaction_.joinable()) compaction_.join();
}

void RowLogCore::close() {
  if (closed_) return;
  if (!writer_) {
    closed_ = true;
    lock_.reset();
    return;
  }
  stop();
  std::string failure;
  try {
    sync();
  } catch (const std::exception& error) {
    failure = error.what();
  }
  closed_ = true;
  lock_.reset();
  if (!failure.empty()) throw TierError(failure, path_);
}

uint64_t RowLogCore::memory_bytes() const {
  return (writer_ ? writer_->memory_bytes() : 0) + engine_.memory_bytes();
}

void RowLogCore::want_compaction() {
  {
    std::lock_guard lock(compaction_mutex_);
    wanted_ = true;
  }
  compaction_wanted_.notify_one();
}

void RowLogCore::compact() {
  std::unique_lock lock(compaction_mutex_);
  for (;;) {
    compaction_wanted_.wait(lock, [&] { return wanted_ || stopping_; });
    if (stopping_) return;
    wanted_ = false;
    lock.unlock();
    for (auto& tier : tiers_) {
      while (!stopping_ && tier->compaction_due()) {
        try {
          if (!tier->compact_step()) break;
        } catch (const std::exception&) {
          break;  // the statistics tell it; the next new segment makes it try again
        }
      }
    }
    lock.lock();
  }
}

// --- RowLog. ---

bool holds_log(const std::string& path) {
  std::error_code error;
  std::string manifest = path + "/" + kManifest;
  if (!std::filesystem::is_directory(path, error) || !is_file(manifest)) return false;
  std::ifstream file(manifest, std::ios::binary);
  uint8_t bytes[64];
  file.read(reinterpret_cast<char*>(bytes), sizeof bytes);
  return begins_manifest({bytes, static_cast<size_t>(file.gcount())});
}

std::vector<std::string> discard_log(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_symlink(path, error)) {
    throw TierError(path + " is a link. Remove the log where it lies.", path);
  }
  if (!holds_log(path)) throw TierError("The folder " + path + " holds no row log.", path);
  {
    auto lock = lock_folder(path, false);
    remove_files(path);
    std::filesystem::remove(path + "/" + kLock, error);
    if (error) throw TierError("Discarding the row log " + path + ": " + error.message(), path);
  }
  std::vector<std::string> left;
  for (const auto& entry : std::filesystem::directory_iterator(path, error)) {
    left.push_back(entry.path().filename().string());
  }
  std::sort(left.begin(), left.end());
  // A folder in which something is left is not removed by this.
  std::filesystem::remove(path, error);
  return left;
}

RowLog::RowLog(std::unique_ptr<RowLogCore> core) : core_(std::move(core)), process_(getpid()) {}

RowLog::~RowLog() {
  // The threads of a forked process are not there, and its files are its parent's.
  if (getpid() != process_) static_cast<void>(core_.release());
}

std::unique_ptr<RowLog> RowLog::create(const std::string& path, std::vector<LogStore> stores,
                                       LogOptions options) {
  check_options(options);
  Manifest manifest;
  manifest.log = std::random_device()();
  manifest.segment_bytes = options.segment_bytes;
  manifest.stores = std::move(stores);
  check_manifest(manifest);
  std::error_code error;
  bool made = std::filesystem::create_directories(path, error);
  if (error) throw TierError("The folder " + path + " of a row log: " + error.message(), path);
  try {
    return begin(path, std::move(manifest), std::move(options));
  } catch (...) {
    if (made) {
      for (const char* name : {kManifest, kLock}) std::filesystem::remove(path + "/" + name, error);
      std::filesystem::remove(path, error);
    }
    throw;
  }
}

// In a folder that exists.
std::unique_ptr<RowLog> RowLog::begin(const std::string& path, Manifest manifest,
                                      LogOptions options) {
  auto lock = lock_folder(path, false);
  bool held = holds_log(path);
  if (held && !options.reset) {
    throw TierError("The folder " + path +
                        " holds a row log already. Pass reset=True to discard it, or look into it "
                        "with `hotbed inspect`.",
                    path);
  }
  if (held) remove_files(path);
  if (!segment_files_in(path).empty() || std::filesystem::exists(path + "/" + kManifest)) {
    throw TierError("The folder " + path +
                        " holds files named as those of a row log, which are none. Take another.",
                    path);
  }
  return std::unique_ptr<RowLog>(new RowLog(std::make_unique<RowLogCore>(
      path, std::move(lock), std::move(manifest), std::move(options))));
}

std::unique_ptr<RowLog> RowLog::open_to_read(const std::string& path, IoOptions io, bool locked) {
  Manifest manifest = read_manifest(path);
  auto lock = locked ? lock_folder(path, true) : nullptr;
  return std::unique_ptr<RowLog>(new RowLog(
      std::make_unique<RowLogCore>(path, std::move(lock), std::move(manifest), std::move(io))));
}

const std::string& RowLog::path() const { return core_->path(); }

const Manifest& RowLog::manifest() const { return core_->manifest(); }

size_t RowLog::stores() const { return core_->tiers_.size(); }

LogTier& RowLog::tier(size_t store) {
  if (store >= stores()) {
    throw std::invalid_argument("The row log has " + std::to_string(stores()) + " stores; " +
                                std::to_string(store) + " is none of them.");
  }
  return *core_->tiers_[store];
}

void RowLog::flush() { core_->flush(); }

void RowLog::sync() { core_->sync(); }

void RowLog::link(const std::string& folder) { core_->link(folder); }

bool RowLog::adopt(const std::string& folder) { return core_->adopt(folder); }

void RowLog::close() {
  if (getpid() == process_) core_->close();
}

const std::vector<RecoveryReport>& RowLog::recovery() const { return core_->recovery_; }

LogStatistics RowLog::statistics() const {
  LogStatistics s;
  s.io = core_->engine_.statistics();
  if (core_->writer_) s.writer = core_->writer_->statistics();
  for (const auto& tier : core_->tiers_) {
    s.stores.push_back(tier->statistics());
    s.memory_bytes += tier->memory_bytes();
  }
  return s;
}

}  // namespace hotbed
