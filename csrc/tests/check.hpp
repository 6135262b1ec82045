// Checks and the main function of a C++ test. Each csrc/tests/*_test.cpp is one program and
// includes this once; TEST(name) { ... } defines a case.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

namespace check {

struct Case {
  const char* name;
  void (*run)();
};

inline std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

struct Registration {
  Registration(const char* name, void (*run)()) { cases().push_back({name, run}); }
};

[[noreturn]] inline void fail(const char* file, int line) {
  std::cerr << "\n  at " << file << ":" << line << std::endl;
  std::exit(1);
}

}  // namespace check

#define TEST(name)                                             \
  static void name();                                          \
  static check::Registration name##_registration(#name, name); \
  static void name()

#define CHECK(condition)                  \
  do {                                    \
    if (!(condition)) {                   \
      std::cerr << "failed: " #condition; \
      check::fail(__FILE__, __LINE__);    \
    }                                     \
  } while (0)

#define CHECK_EQ(left, right)                                                             \
  do {                                                                                    \
    auto left_value = (left);                                                             \
    auto right_value = (right);                                                           \
    if (!(left_value == right_value)) {                                                   \
      std::cerr << "failed: " #left " == " #right ", which are " << left_value << " and " \
                << right_value;                                                           \
      check::fail(__FILE__, __LINE__);                                                    \
    }                                                                                     \
  } while (0)

// Gives the message of the exception, for further checks: CHECK(CHECK_THROWS(f(), E).find("...")
// ...).
#define CHECK_THROWS(expression, Exception)                           \
  [&]() -> std::string {                                              \
    try {                                                             \
      expression;                                                     \
    } catch (const Exception& thrown) {                               \
      return thrown.what();                                           \
    }                                                                 \
    std::cerr << "failed: " #expression " did not throw " #Exception; \
    check::fail(__FILE__, __LINE__);                                  \
  }()

int main() {
  for (const check::Case& test : check::cases()) {
    std::cout << test.name << std::endl;
    try {
      test.run();
    } catch (const std::exception& error) {
      std::cerr << "failed: " << test.name << " threw " << error.what() << std::endl;
      return 1;
    }
  }
}
