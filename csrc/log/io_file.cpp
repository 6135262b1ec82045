// What IoEngine does to files besides transfers.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "log/io_engine.hpp"

namespace hotbed {

namespace {

std::string directory_of(const std::string& path) {
  size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

}  // namespace

IoError::IoError(const std::string& doing, std::string of_path, uint64_t at, uint64_t count,
                 int errno_code)
    : std::runtime_error(of_path + ": " + doing + " " + std::to_string(count) +
                         " bytes at offset " + std::to_string(at) +
                         " failed: " + std::strerror(errno_code)),
      path(std::move(of_path)),
      offset(at),
      bytes(count),
      code(errno_code) {}

uint64_t IoFile::size() const {
  struct stat status;
  if (fstat(descriptor(), &status) != 0) throw IoError("asking the size, with", path_, 0, 0, errno);
  return static_cast<uint64_t>(status.st_size);
}

size_t IoEngine::note(IoEvent::Kind kind, const std::string& path, size_t pair, uint64_t offset,
                      const std::string& target) {
  if (!options_.observer) return 0;
  return options_.observer->note(
      {.kind = kind, .path = path, .target = target, .offset = offset, .data = {}, .pair = pair});
}

std::shared_ptr<IoFile> IoEngine::opened(const std::string& path, int flags) {
  bool direct = options_.direct;
  Descriptor descriptor;
  if (direct) descriptor = Descriptor(path, flags | O_DIRECT);
  // EINVAL is how a file system refuses O_DIRECT; it may have made the file before it did.
  if (direct && descriptor.number() < 0 && errno == EINVAL) {
    direct = false;
    flags &= ~O_EXCL;
  }
  if (!direct) descriptor = Descriptor(path, flags);
  if (descriptor.number() < 0) throw IoError("opening, with", path, 0, 0, errno);
  if (!direct) posix_fadvise(descriptor.number(), 0, 0, POSIX_FADV_RANDOM);
  ++(direct ? counters_.direct_files : counters_.buffered_files);
  return std::make_shared<IoFile>(path, std::move(descriptor), direct);
}

std::shared_ptr<IoFile> IoEngine::create(const std::string& path, uint64_t bytes,
                                         bool preallocate) {
  int error = preallocate && options_.observer ? options_.observer->before_preallocation(bytes) : 0;
  if (error) throw IoError("preallocating", path, 0, bytes, error);
  auto file = opened(path, O_RDWR | O_CREAT | O_EXCL);
  note(IoEvent::Kind::create, path, 0, bytes);
  auto size = static_cast<off_t>(bytes);
  if (preallocate) {
    do {
      error = fallocate(file->descriptor(), 0, 0, size) == 0 ? 0 : errno;
    } while (error == EINTR);
    if (error == EOPNOTSUPP) preallocate = false;
  }
  if (!preallocate) error = ftruncate(file->descriptor(), size) == 0 ? 0 : errno;
  if (error) {
    ::unlink(path.c_str());
    note(IoEvent::Kind::remove, path);
    throw IoError("preallocating", path, 0, bytes, error);
  }
  return file;
}

std::shared_ptr<IoFile> IoEngine::open(const std::string& path) { return opened(path, O_RDONLY); }

void IoEngine::sync(const IoFile& file) {
  size_t started = note(IoEvent::Kind::sync_started, file.path());
  int error = options_.observer ? options_.observer->before_sync() : 0;
  if (!error && fdatasync(file.descriptor()) != 0) error = errno;
  if (error) {
    ++counters_.errors;
    throw IoError("syncing, with", file.path(), 0, 0, error);
  }
  ++counters_.syncs;
  note(IoEvent::Kind::sync_finished, file.path(), started);
}

void IoEngine::sync_directory(const std::string& path) {
  size_t started = note(IoEvent::Kind::directory_started, path);
  Descriptor directory(path, O_RDONLY | O_DIRECTORY);
  // EINVAL: a file system without directories to sync.
  if (directory.number() < 0 || (fsync(directory.number()) != 0 && errno != EINVAL)) {
    throw IoError("syncing the directory, with", path, 0, 0, errno);
  }
  ++counters_.syncs;
  note(IoEvent::Kind::directory_finished, path, started);
}

void IoEngine::replace(const std::string& path, std::span<const uint8_t> bytes) {
  std::string fresh = path + ".new";
  ::unlink(fresh.c_str());
  {
    Descriptor file(fresh, O_WRONLY | O_CREAT | O_EXCL);
    if (file.number() < 0) throw IoError("opening, with", fresh, 0, 0, errno);
    note(IoEvent::Kind::create, fresh, 0, bytes.size());
    for (size_t moved = 0; moved < bytes.size();) {
      ssize_t count = ::write(file.number(), &bytes[moved], bytes.size() - moved);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) throw IoError("writing", fresh, moved, bytes.size() - moved, errno);
      moved += static_cast<size_t>(count);
    }
    if (options_.observer) {
      size_t event = options_.observer->note({.kind = IoEvent::Kind::write_started,
                                              .path = fresh,
                                              .target = {},
                                              .data = {bytes.begin(), bytes.end()}});
      note(IoEvent::Kind::write_finished, fresh, event);
    }
    size_t started = note(IoEvent::Kind::sync_started, fresh);
    if (fsync(file.number()) != 0) throw IoError("syncing, with", fresh, 0, 0, errno);
    note(IoEvent::Kind::sync_finished, fresh, started);
  }
  note(IoEvent::Kind::rename, fresh, 0, 0, path);
  if (::rename(fresh.c_str(), path.c_str()) != 0) {
    throw IoError("renaming, with", fresh, 0, bytes.size(), errno);
  }
  sync_directory(directory_of(path));
}

void IoEngine::release_behind(const IoFile& file, uint64_t bytes) {
  if (bytes >= file.size()) return;
  (void)!fallocate(file.descriptor(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                   static_cast<off_t>(bytes), static_cast<off_t>(file.size() - bytes));
}

void IoEngine::link(const std::string& path, const std::string& to) {
  note(IoEvent::Kind::link, path, 0, 0, to);
  if (::link(path.c_str(), to.c_str()) != 0) throw IoError("linking, with", to, 0, 0, errno);
}

void IoEngine::remove(const std::string& path) {
  note(IoEvent::Kind::remove, path);
  if (::unlink(path.c_str()) != 0) throw IoError("removing, with", path, 0, 0, errno);
}

}  // namespace hotbed
