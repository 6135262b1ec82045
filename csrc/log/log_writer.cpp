#include "log/log_writer.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace hotbed {

LogWriter::LogWriter(IoEngine& engine, uint64_t buffer_bytes, unsigned buffers)
    : engine_(engine), buffer_bytes_(buffer_bytes), limit_(buffers) {
  thread_ = std::thread([this] { work(); });
  // Its queue takes memory, which is to be counted from the start.
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [&] { return ready_; });
  if (!unready_) return;
  lock.unlock();
  thread_.join();
  std::rethrow_exception(unready_);
}

LogWriter::~LogWriter() {
  stop();
  failed_.clear();
  for (uint8_t* memory : free_) std::free(memory);
}

void LogWriter::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<LogBuffer> LogWriter::take() {
  uint8_t* memory = nullptr;
  {
    std::unique_lock lock(mutex_);
    auto ready = [&] { return !free_.empty() || allocated_ < limit_ || failing_; };
    if (!ready()) {
      ++statistics_.waits;
      progress_.wait(lock, ready);
    }
    if (!free_.empty()) {
      memory = free_.back();
      free_.pop_back();
    } else {
      memory = static_cast<uint8_t*>(std::aligned_alloc(kBlockUnit, buffer_bytes_));
      if (!memory) throw OutOfMemory("a buffer of the row log", buffer_bytes_, available_memory());
      ++allocated_;
    }
  }
  std::memset(memory, 0, buffer_bytes_);
  auto* buffer = new LogBuffer;
  buffer->data = memory;
  return {buffer, [this](LogBuffer* gone) { give_back(gone); }};
}

void LogWriter::give_back(LogBuffer* buffer) {
  {
    std::lock_guard lock(mutex_);
    if (allocated_ > limit_) {
      std::free(buffer->data);
      --allocated_;
    } else {
      free_.push_back(buffer->data);
    }
  }
  delete buffer;
  progress_.notify_all();
}

void LogWriter::seal(std::shared_ptr<LogBuffer> buffer) {
  {
    std::lock_guard lock(mutex_);
    buffer->ticket = next_ticket_++;
    outstanding_.insert(buffer->ticket);
    statistics_.most_in_flight = std::max(statistics_.most_in_flight, outstanding_.size());
    sealed_.push_back(std::move(buffer));
  }
  work_.notify_one();
}

// Until tickets up to this one are written, or one fails.
void LogWriter::await(std::unique_lock<std::mutex>& lock, uint64_t ticket) {
  if (failing_) {
    failing_ = false;
    sealed_.insert(sealed_.begin(), failed_.begin(), failed_.end());
    failed_.clear();
    work_.notify_one();
  }
  progress_.wait(
      lock, [&] { return failing_ || outstanding_.empty() || *outstanding_.begin() > ticket; });
  if (failing_) throw TierError(failure_, failed_path_, failed_bytes_);
}

void LogWriter::settle() {
  std::unique_lock lock(mutex_);
  if (!failing_) return;
  uint64_t last = 0;
  for (const auto& buffer : failed_) last = std::max(last, buffer->ticket);
  await(lock, last);
}

void LogWriter::wait() {
  std::unique_lock lock(mutex_);
  await(lock, next_ticket_ - 1);
}

void LogWriter::work() {
  auto be_ready = [&] {
    std::lock_guard lock(mutex_);
    ready_ = true;
    progress_.notify_all();
  };
  try {
    auto queue = engine_.lease(false);
    be_ready();
    write(*queue);
  } catch (...) {
    if (ready_) throw;
    unready_ = std::current_exception();
    be_ready();
  }
}

void LogWriter::write(IoQueue& queue) {
  std::vector<std::shared_ptr<LogBuffer>> writing;  // by tag; null where free
  std::vector<Completion> done;
  std::unique_lock lock(mutex_);
  for (;;) {
    if (queue.in_flight() == 0) {
      work_.wait(lock, [&] { return stopping_ || !sealed_.empty(); });
      if (sealed_.empty()) return;
    }
    std::vector<std::shared_ptr<LogBuffer>> starting;
    size_t most = queue.depth() - queue.in_flight();
    while (!sealed_.empty() && starting.size() < most) {
      starting.push_back(std::move(sealed_.front()));
      sealed_.pop_front();
    }
    lock.unlock();
    for (auto& buffer : starting) {
      uint32_t block_bytes = buffer->layout->block_bytes;
      for (uint32_t b = 0; b < buffer->blocks; ++b) {
        uint8_t* block = buffer->data + uint64_t{b} * block_bytes;
        BlockHeader header = header_of(block);
        header.log = buffer->header.log;
        header.segment = buffer->header.segment;
        header.store = buffer->header.store;
        header.block = buffer->first_block + b;
        seal_block(block, *buffer->layout, header);
      }
      size_t tag = 0;
      while (tag < writing.size() && writing[tag]) ++tag;
      if (tag == writing.size()) writing.emplace_back();
      queue.submit({buffer->segment->file.get(), uint64_t{buffer->first_block} * block_bytes,
                    buffer->data, buffer->blocks * block_bytes, true, tag});
      writing[tag] = std::move(buffer);
    }
    done.clear();
    queue.collect(1, done);
    for (const Completion& completion : done) {
      if (completion.error == 0) writing[completion.tag]->written(writing[completion.tag]);
    }
    lock.lock();
    for (const Completion& completion : done) {
      std::shared_ptr<LogBuffer> buffer = std::move(writing[completion.tag]);
      if (completion.error == 0) {
        outstanding_.erase(buffer->ticket);
        // Its memory goes back through give_back(), which takes the lock.
        lock.unlock();
        buffer.reset();
        lock.lock();
        continue;
      }
      IoError error("writing", buffer->segment->file->path(),
                    uint64_t{buffer->first_block} * buffer->layout->block_bytes,
                    uint64_t{buffer->blocks} * buffer->layout->block_bytes, completion.error);
      failing_ = true;
      failure_ = std::string(error.what()) +
                 ". The rows stay readable from memory. Make space there (or mend the device), and "
                 "write on.";
      failed_path_ = error.path;
      failed_bytes_ = error.bytes;
      failed_.push_back(std::move(buffer));
    }
    progress_.notify_all();
  }
}

LogWriterStatistics LogWriter::statistics() const {
  std::lock_guard lock(mutex_);
  LogWriterStatistics s = statistics_;
  s.in_flight = outstanding_.size();
  s.failed = failed_.size();
  return s;
}

uint64_t LogWriter::memory_bytes() const {
  std::lock_guard lock(mutex_);
  return allocated_ * buffer_bytes_;
}

}  // namespace hotbed
