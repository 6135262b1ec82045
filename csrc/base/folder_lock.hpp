// A folder that one user holds, or several that read.
#pragma once

#include <string>
#include <utility>

#include "base/descriptor.hpp"

namespace hotbed {

// A locked file in the folder, which says who has it. The lock ends with this object, or with the
// process, and forked children have no part in it.
//
// Threads: one at a time; locks are made and let go beside each other.
class FolderLock {
 public:
  // `name`: of the file. `what` begins and `remedy` ends the message where another has it. Throws
  // TierError, naming the process that has it where that is known; also where the file is somebody
  // else's.
  FolderLock(const std::string& folder, const std::string& name, bool shared,
             const std::string& what, const std::string& remedy);
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  ~FolderLock();

  // Whether the process that made it is the one from which this was forked.
  bool inherited() const { return file_.inherited(); }

 private:
  Descriptor file_;
  std::pair<uint64_t, uint64_t> file_number_;  // device and inode
};

}  // namespace hotbed
