// The log of calls: what the harness counts is compared with it.
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>

#include "settings.h"

namespace stub {

void log_call(const char* call, int group_size, size_t bytes) {
  const char* folder = text("CUDA_STUB_LOG");
  if (!folder || !*folder) return;
  const char* rank = text("RANK");
  const std::string path = std::string(folder) + "/rank-" + (rank ? rank : "none") + ".tsv";
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  char line[160];
  const int length = std::snprintf(line, sizeof line, "%lld\t%s\t%d\t%zu\n",
                                   now.tv_sec * 1000000000LL + now.tv_nsec, call, group_size, bytes);
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
  if (file < 0) return;
  if (write(file, line, length) != length) std::perror("CUDA_STUB_LOG");
  close(file);
}

}  // namespace stub
