// Joining, splitting, aborting.
#include "communicator.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <random>

#include "settings.h"

namespace stub {

ncclComm* join(const std::string& name, int size, int rank) {
  if (size > MOST_RANKS) return nullptr;
  auto* joined = new ncclComm;
  joined->name = name;
  joined->size = size;
  joined->rank = rank;
  const std::string segment = "/cuda-stub-" + name;
  const size_t letters = LETTER_BYTES * size * size;
  const size_t bytes = sizeof(Shared) + SLOT_BYTES * size + letters;  // pages cost nothing before they are touched
  const int file = shm_open(segment.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0 || ftruncate(file, bytes)) {
    std::perror("segment of the NCCL stub");
    return nullptr;
  }
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped == MAP_FAILED) return nullptr;
  joined->shared = static_cast<Shared*>(mapped);
  joined->slots = static_cast<char*>(mapped) + sizeof(Shared);
  joined->letters = joined->slots + SLOT_BYTES * size;
  joined->shared->process[rank] = getpid();
  const bool all_here = joined->meet();
  if (rank == 0) shm_unlink(segment.c_str());  // all have mapped it: it goes with them
  return all_here ? joined : nullptr;
}

}  // namespace stub

bool ncclComm::lost_a_peer() const {
  for (int other = 0; other < size; other++) {
    const int process = shared->process[other];
    if (process && kill(process, 0)) return true;
  }
  return false;
}

bool ncclComm::wait(const std::function<bool()>& ready) {
  for (long turn = 0; !ready(); turn++) {
    if (aborted) return false;
    if (turn % 2000 == 1999 && lost_a_peer()) {
      last_error = "remote process exited or there was a network error";
      error = ncclRemoteError;
      cuda_stub_stop_device();
      return false;
    }
    usleep(turn < 200 ? 10 : 50);
  }
  return true;
}

bool ncclComm::meet() {
  if (error != ncclSuccess || aborted) return false;
  const int generation = shared->generation;
  if (shared->arrived.fetch_add(1) + 1 == size) {
    shared->arrived = 0;
    shared->generation = generation + 1;
    return true;
  }
  return wait([&] { return shared->generation != generation; });
}

EXPORT ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 0, sizeof *id);
  std::random_device source;
  std::snprintf(id->internal, sizeof id->internal, "%08x%08x", source(), source());
  return ncclSuccess;
}

EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t* joined, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  *joined = stub::join(id.internal, size, rank);
  return *joined ? ncclSuccess : ncclSystemError;
}
EXPORT ncclResult_t ncclCommInitRank(ncclComm_t* joined, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(joined, size, id, rank, nullptr);
}
EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t* joined, int size, int rank, int, ncclUniqueId* id,
                                             ncclConfig_t*) {
  return ncclCommInitRankConfig(joined, size, *id, rank, nullptr);
}

// Ranks of one colour form a communicator, in the order of their keys.
EXPORT ncclResult_t ncclCommSplit(ncclComm_t from, int color, int key, ncclComm_t* joined, ncclConfig_t*) {
  *joined = nullptr;
  from->shared->split[from->rank][0] = color;
  from->shared->split[from->rank][1] = key;
  if (!from->meet()) return ncclRemoteError;
  std::vector<std::pair<long, int>> members;
  for (int rank = 0; rank < from->size; rank++)
    if (from->shared->split[rank][0] == color) members.emplace_back(from->shared->split[rank][1], rank);
  std::sort(members.begin(), members.end());
  const std::string name = from->name + "-" + std::to_string(from->splits++) + "-" + std::to_string(color);
  if (!from->meet()) return ncclRemoteError;
  if (color < 0) return ncclSuccess;
  const auto own = std::find_if(members.begin(), members.end(), [&](auto& one) { return one.second == from->rank; });
  *joined = stub::join(name, static_cast<int>(members.size()), static_cast<int>(own - members.begin()));
  return *joined ? ncclSuccess : ncclSystemError;
}

EXPORT ncclResult_t ncclCommCount(const ncclComm_t communicator, int* size) {
  *size = communicator->size;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t communicator, int* rank) {
  *rank = communicator->rank;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* error) {
  *error = communicator->error;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  communicator->aborted = true;
  return ncclSuccess;
}
// Its memory stays mapped: another thread may still wait in it.
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t) { return ncclSuccess; }

EXPORT const char* ncclGetErrorString(ncclResult_t error) {
  switch (error) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    default: return "error of the NCCL stub";
  }
}
EXPORT const char* ncclGetLastError(ncclComm_t) {
  return ncclComm::last_error.c_str();
}
