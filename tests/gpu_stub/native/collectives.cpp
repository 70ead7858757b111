// Collectives: done when the call returns, and logged with the bytes of the complete tensor.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "communicator.h"
#include "reduction.h"
#include "settings.h"

namespace {

using stub::SLOT_BYTES;

std::atomic<unsigned long long> calls{0};

// Logs a call and says with what it fails: CUDA_STUB_NCCL_OUT_OF_MEMORY=N fails the N-th call as NCCL does where
// it cannot allocate; CUDA_STUB_NCCL_ERROR=N stops the device in it, of which only ncclCommGetAsyncError tells.
ncclResult_t begin(const char* call, ncclComm* with, size_t bytes) {
  stub::log_call(call, with->size, bytes);
  const unsigned long long number = ++calls;
  if (number == stub::fault("CUDA_STUB_NCCL_OUT_OF_MEMORY")) {
    with->last_error = "Failed to CUDA calloc async 4194304 bytes: Cuda failure 2 'out of memory'";
    return ncclUnhandledCudaError;
  }
  if (number == stub::fault("CUDA_STUB_NCCL_ERROR")) {
    with->last_error = "NET/IB : Got completion with error 12";
    with->error = ncclSystemError;
    cuda_stub_stop_device();
  }
  return ncclSuccess;
}

// Calls `part(offset, bytes)` for pieces that fit in a slot; ranks agree on them, since they agree on the total.
// Stops when ranks do not meet: the device is stopped then, and what its tensors hold is as undefined as there.
template <typename Part>
ncclResult_t in_pieces(size_t bytes, Part part) {
  size_t at = 0;
  do {
    const size_t piece = std::min(SLOT_BYTES, bytes - at);
    if (!part(at, piece)) break;
    at += piece;
  } while (at < bytes);
  return ncclSuccess;
}

const char* bytes_at(const void* tensor, size_t offset) { return static_cast<const char*>(tensor) + offset; }
char* bytes_at(void* tensor, size_t offset) { return static_cast<char*>(tensor) + offset; }

// The reduction, on the rank `only` or on all (-1).
ncclResult_t all_reduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                        ncclComm* with, int only) {
  const size_t width = stub::element_bytes(type);
  return in_pieces(count * width, [&](size_t at, size_t piece) {
    std::memcpy(with->slot(with->rank), bytes_at(from, at), piece);
    if (!with->meet()) return false;
    if (only < 0 || only == with->rank) stub::reduce(*with, bytes_at(to, at), piece / width, type, operation);
    return with->meet();
  });
}

}  // namespace

EXPORT ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                                  ncclRedOp_t operation, ncclComm_t with, cudaStream_t) {
  const ncclResult_t begun = begin("all_reduce", with, count * stub::element_bytes(type));
  return begun ? begun : all_reduce(from, to, count, type, operation, with, -1);
}

EXPORT ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                               int root, ncclComm_t with, cudaStream_t) {
  const ncclResult_t begun = begin("reduce", with, count * stub::element_bytes(type));
  return begun ? begun : all_reduce(from, to, count, type, operation, with, root);
}

EXPORT ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                                  ncclComm_t with, cudaStream_t) {
  const size_t bytes = count * stub::element_bytes(type);
  const ncclResult_t begun = begin("broadcast", with, bytes);
  if (begun) return begun;
  return in_pieces(bytes, [&](size_t at, size_t piece) {
    if (with->rank == root) std::memcpy(with->slot(root), bytes_at(from, at), piece);
    if (!with->meet()) return false;
    std::memcpy(bytes_at(to, at), with->slot(root), piece);
    return with->meet();
  });
}
EXPORT ncclResult_t ncclBcast(void* tensor, size_t count, ncclDataType_t type, int root, ncclComm_t with,
                              cudaStream_t stream) {
  return ncclBroadcast(tensor, tensor, count, type, root, with, stream);
}

EXPORT ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t with,
                                  cudaStream_t) {
  const size_t bytes = count * stub::element_bytes(type);
  const ncclResult_t begun = begin("all_gather", with, bytes * with->size);
  if (begun) return begun;
  return in_pieces(bytes, [&](size_t at, size_t piece) {
    std::memcpy(with->slot(with->rank), bytes_at(from, at), piece);
    if (!with->meet()) return false;
    for (int rank = 0; rank < with->size; rank++)
      std::memcpy(bytes_at(to, bytes * rank + at), with->slot(rank), piece);
    return with->meet();
  });
}

EXPORT ncclResult_t ncclAlltoAll(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t with,
                                 cudaStream_t) {
  const size_t bytes = count * stub::element_bytes(type);
  const ncclResult_t begun = begin("all_to_all", with, bytes * with->size);
  if (begun) return begun;
  for (int receiver = 0; receiver < with->size; receiver++)
    in_pieces(bytes, [&](size_t at, size_t piece) {
      std::memcpy(with->slot(with->rank), bytes_at(from, bytes * receiver + at), piece);
      if (!with->meet()) return false;
      if (receiver == with->rank)
        for (int rank = 0; rank < with->size; rank++)
          std::memcpy(bytes_at(to, bytes * rank + at), with->slot(rank), piece);
      return with->meet();
    });
  return ncclSuccess;
}

EXPORT ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                                      ncclRedOp_t operation, ncclComm_t with, cudaStream_t) {
  const size_t width = stub::element_bytes(type), bytes = count * width;
  const ncclResult_t begun = begin("reduce_scatter", with, bytes * with->size);
  if (begun) return begun;
  std::vector<char> own(bytes);  // `to` may be a part of `from`
  for (int rank = 0; rank < with->size; rank++)
    in_pieces(bytes, [&](size_t at, size_t piece) {
      std::memcpy(with->slot(with->rank), bytes_at(from, bytes * rank + at), piece);
      if (!with->meet()) return false;
      if (rank == with->rank) stub::reduce(*with, own.data() + at, piece / width, type, operation);
      return with->meet();
    });
  std::memcpy(to, own.data(), bytes);
  return ncclSuccess;
}
