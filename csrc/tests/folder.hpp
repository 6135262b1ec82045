// A folder of its own for a test, removed with all that is in it.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>

struct Folder {
  enum class On { disk, memory };  // memory: for tests that sync much, where there is such a place

  explicit Folder(On where = On::disk) {
    const char* base = std::getenv("TMPDIR");
    std::string name = base && *base ? base : "/tmp";
    if (where == On::memory && access("/dev/shm", W_OK) == 0) name = "/dev/shm";
    name += "/hotbed-test-XXXXXX";
    if (!mkdtemp(name.data())) std::abort();
    path = name;
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() { std::filesystem::remove_all(path); }
  std::string operator/(const std::string& name) const { return path + "/" + name; }
  std::string path;
};
