// Communicators over shared memory: ranks of one machine that meet in barriers and copy each other's slots.
#pragma once
#include <nccl.h>

#include <atomic>
#include <functional>
#include <string>
#include <vector>

namespace stub {

constexpr int MOST_RANKS = 64;
constexpr size_t SLOT_BYTES = 16 << 20;  // of each rank, for collectives
constexpr size_t LETTER_BYTES = 1 << 20;  // of each pair of ranks, for send and receive

// In the segment that all ranks of a communicator map.
struct Shared {
  std::atomic<int> arrived, generation;
  std::atomic<int> process[MOST_RANKS];
  long split[MOST_RANKS][2];  // colour and key of each rank, during ncclCommSplit
  std::atomic<int> letter_full[MOST_RANKS][MOST_RANKS];  // sender, receiver
};

}  // namespace stub

struct ncclComm {
  stub::Shared* shared = nullptr;
  char* slots = nullptr;
  char* letters = nullptr;
  int rank = 0, size = 0, splits = 0;
  std::string name;
  std::atomic<bool> aborted{false};
  std::atomic<ncclResult_t> error{ncclSuccess};  // what ncclCommGetAsyncError tells
  static inline std::string last_error;  // of the process: torch asks without a communicator

  char* slot(int of_rank) const { return slots + stub::SLOT_BYTES * of_rank; }
  char* letter(int from, int to) const { return letters + stub::LETTER_BYTES * (from * size + to); }

  // Waits until all ranks are here. False: aborted, or a rank is gone, which stops the device as a kernel of
  // NCCL that waits for its peer would, and is told by ncclCommGetAsyncError.
  bool meet();
  // Waits until `ready`, with the same ends.
  bool wait(const std::function<bool()>& ready);
  // Whether a rank that has joined is gone.
  bool lost_a_peer() const;
};

namespace stub {

ncclComm* join(const std::string& name, int size, int rank);
size_t element_bytes(ncclDataType_t type);

}  // namespace stub
