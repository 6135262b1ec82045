// Arrays over slots.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/errors.hpp"
#include "base/integers.hpp"
#include "base/memory.hpp"

namespace hotbed {

// One array over slots: `width` elements of `element` bytes a row, rows without padding.
class Plane {
 public:
  // `what_for` begins, and `remedy` ends, the message where there is no memory for it.
  Plane(std::string what_for, int64_t width, size_t element,
        std::string remedy = OutOfMemory::kRemedy)
      : what_for_(std::move(what_for)),
        remedy_(std::move(remedy)),
        width_(width),
        row_bytes_(width * element),
        mapping_(std::make_shared<Mapping>()) {}

  void rename(std::string what_for) { what_for_ = std::move(what_for); }

  // Room for `rows` rows; grows by halves, and by just what is needed where memory is short.
  void ensure(int64_t rows) {
    if (bytes(rows) > mapping_->bytes()) grow(rows);
  }

  // Gives the memory of rows from `rows` on back.
  void release(int64_t rows) { mapping_->release(bytes(rows), mapping_->bytes()); }
  // The same without splitting a huge page.
  void release_pages(int64_t rows) { mapping_->release(page_bytes(rows), mapping_->bytes()); }

  // Another view of the same memory; none of them may grow any more.
  void share(const Plane& other) { mapping_ = other.mapping_; }

  // Lets go of the memory, which stays as long as somebody holds it.
  void release() { mapping_ = std::make_shared<Mapping>(); }
  std::shared_ptr<const void> hold() const { return mapping_; }

  uint8_t* data() const { return mapping_->data(); }
  uint8_t* row(int64_t slot) const { return mapping_->data() + slot * row_bytes_; }
  int64_t width() const { return width_; }
  int64_t row_bytes() const { return row_bytes_; }
  // Bytes that `rows` rows take; UINT64_MAX where that is beyond counting.
  uint64_t bytes(int64_t rows) const {
    return product(static_cast<uint64_t>(rows), static_cast<uint64_t>(row_bytes_));
  }
  // What they take in whole pages, also where it must grow for them; UINT64_MAX as above.
  uint64_t page_bytes(int64_t rows) const { return mapping_->page_bytes(bytes(rows), room(rows)); }
  // Fresh pages for rows that are about to be written: one at a time they take a third longer.
  void populate(int64_t first, int64_t count) const;
  // What it takes now.
  uint64_t resident_bytes() const { return mapping_->resident_bytes(); }
  // The same where the first `rows` rows were written, and no others.
  uint64_t written_bytes(int64_t rows) const { return mapping_->written_bytes(0, bytes(rows)); }

 private:
  void grow(int64_t rows);
  uint64_t room(int64_t rows) const {
    uint64_t needed = bytes(rows), have = mapping_->bytes();
    return needed <= have ? have : std::max(needed, have + have / 2);
  }

  std::string what_for_;
  std::string remedy_;
  int64_t width_;
  int64_t row_bytes_;
  std::shared_ptr<Mapping> mapping_;
};

}  // namespace hotbed
