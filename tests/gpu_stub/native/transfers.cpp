// Send and receive: a letter of each pair of ranks that one fills and the other empties. Within a group all
// transfers go on together, since ranks send to each other before they receive.
#include <algorithm>
#include <cstring>
#include <list>

#include "communicator.h"
#include "settings.h"

namespace {

struct Transfer {
  ncclComm* with;
  char* tensor;
  size_t bytes, done;
  int peer;
  bool sends;

  // Moves one letter if the peer is ready.
  bool step() {
    const int from = sends ? with->rank : peer, to = sends ? peer : with->rank;
    auto& full = with->shared->letter_full[from][to];
    if ((full == 1) == sends) return false;
    const size_t piece = std::min(stub::LETTER_BYTES, bytes - done);
    if (sends) {
      std::memcpy(with->letter(from, to), tensor + done, piece);
    } else {
      std::memcpy(tensor + done, with->letter(from, to), piece);
    }
    full = sends ? 1 : 0;
    done += piece;
    return true;
  }
};

thread_local std::list<Transfer> pending;
thread_local int depth = 0;

ncclResult_t finish() {
  while (!pending.empty()) {
    ncclComm* const with = pending.front().with;
    bool moved = false;
    const bool ended = !with->wait([&] {
      for (auto transfer = pending.begin(); transfer != pending.end();) {
        moved |= transfer->step();
        transfer = transfer->done >= transfer->bytes ? pending.erase(transfer) : std::next(transfer);
      }
      return moved;
    });
    if (ended) pending.clear();
  }
  return ncclSuccess;
}

ncclResult_t transfer(const char* call, const void* tensor, size_t count, ncclDataType_t type, int peer,
                      ncclComm* with) {
  const size_t bytes = count * stub::element_bytes(type);
  stub::log_call(call, with->size, bytes);
  const bool sends = std::strcmp(call, "send") == 0;
  if (bytes) pending.push_back({with, static_cast<char*>(const_cast<void*>(tensor)), bytes, 0, peer, sends});
  return depth ? ncclSuccess : finish();
}

}  // namespace

EXPORT ncclResult_t ncclSend(const void* tensor, size_t count, ncclDataType_t type, int peer, ncclComm_t with,
                             cudaStream_t) {
  return transfer("send", tensor, count, type, peer, with);
}
EXPORT ncclResult_t ncclRecv(void* tensor, size_t count, ncclDataType_t type, int peer, ncclComm_t with,
                             cudaStream_t) {
  return transfer("recv", tensor, count, type, peer, with);
}
EXPORT ncclResult_t ncclGroupStart() {
  depth++;
  return ncclSuccess;
}
EXPORT ncclResult_t ncclGroupEnd() { return --depth ? ncclSuccess : finish(); }
