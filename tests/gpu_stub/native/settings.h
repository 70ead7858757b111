// What the environment says of the machine that the stub stands for, and which faults it has.
// Every variable is documented in CONTRIBUTING.md.
#pragma once
#include <cstdlib>
#include <cstring>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace stub {

inline const char* text(const char* variable) { return std::getenv(variable); }

inline unsigned long long number(const char* variable, unsigned long long otherwise) {
  const char* value = text(variable);
  return value && *value ? std::strtoull(value, nullptr, 10) : otherwise;
}

// Faults strike all ranks, or the one that CUDA_STUB_FAULT_RANK names.
inline bool strikes_this_rank() {
  const char* struck = text("CUDA_STUB_FAULT_RANK");
  const char* rank = text("RANK");
  return !struck || !*struck || (rank && std::strcmp(struck, rank) == 0);
}

// The fault's number: the N-th call fails. 0: never.
inline unsigned long long fault(const char* variable) { return strikes_this_rank() ? number(variable, 0) : 0; }

// Appends "nanoseconds <tab> call <tab> group size <tab> bytes" to CUDA_STUB_LOG/rank-RANK.tsv.
void log_call(const char* call, int group_size, size_t bytes);

}  // namespace stub

// The device ends no work from now on, as after a collective whose peer is gone: streams never become idle.
EXPORT void cuda_stub_stop_device();
// A line in the log, for tests that mark what follows.
EXPORT void cuda_stub_mark(const char* name);
