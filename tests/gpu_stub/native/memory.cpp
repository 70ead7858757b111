// Device memory, which is host memory, and pinned memory. Beyond a limit an allocation fails, and torch raises
// its own errors from there. Copies happen at once.
#include <sys/mman.h>

#include <map>
#include <mutex>

#include "device.h"
#include "settings.h"

namespace stub {
namespace {

constexpr int PINNED = -1;

struct Block {
  size_t bytes;
  int device;  // or PINNED
};

std::mutex guard;
std::map<char*, Block> blocks;
std::map<int, size_t> used_bytes;  // by device, and of pinned memory

size_t limit_bytes(int device) {
  if (device != PINNED) return strikes_this_rank() ? device_memory_bytes() : 80ull << 30;
  return strikes_this_rank() ? number("CUDA_STUB_PINNED_BYTES", ~0ull) : ~0ull;
}

cudaError_t allocate(void** address, size_t bytes, int device) {
  const std::lock_guard<std::mutex> lock(guard);
  if (bytes > limit_bytes(device) || used_bytes[device] > limit_bytes(device) - bytes)
    return remember(cudaErrorMemoryAllocation);
  // Pages cost nothing before they are touched.
  void* found = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return remember(cudaErrorMemoryAllocation);
  blocks[static_cast<char*>(found)] = {bytes, device};
  used_bytes[device] += bytes;
  if (device != PINNED) log_call("allocate", 0, bytes);
  *address = found;
  return cudaSuccess;
}

cudaError_t release(void* address) {
  if (!address) return cudaSuccess;
  const std::lock_guard<std::mutex> lock(guard);
  const auto found = blocks.find(static_cast<char*>(address));
  if (found == blocks.end()) return remember(cudaErrorInvalidValue);
  used_bytes[found->second.device] -= found->second.bytes;
  if (found->second.device != PINNED) log_call("free", 0, found->second.bytes);
  munmap(address, found->second.bytes ? found->second.bytes : 1);
  blocks.erase(found);
  return cudaSuccess;
}

}  // namespace
}  // namespace stub

EXPORT cudaError_t cudaMalloc(void** address, size_t bytes) {
  return stub::allocate(address, bytes, stub::current_device());
}
EXPORT cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t) { return cudaMalloc(address, bytes); }
EXPORT cudaError_t cudaFree(void* address) { return stub::release(address); }
EXPORT cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return stub::release(address); }
EXPORT cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  return stub::allocate(address, bytes, stub::PINNED);
}
EXPORT cudaError_t cudaMallocHost(void** address, size_t bytes) { return cudaHostAlloc(address, bytes, 0); }
EXPORT cudaError_t cudaFreeHost(void* address) { return stub::release(address); }

EXPORT cudaError_t cudaMemGetInfo(size_t* available, size_t* total) {
  const std::lock_guard<std::mutex> lock(stub::guard);
  *total = stub::device_memory_bytes();
  *available = *total - stub::used_bytes[stub::current_device()];
  return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  std::memset(found, 0, sizeof *found);
  found->device = stub::current_device();
  found->type = cudaMemoryTypeUnregistered;
  found->hostPointer = const_cast<void*>(address);
  const std::lock_guard<std::mutex> lock(stub::guard);
  char* const wanted = static_cast<char*>(const_cast<void*>(address));
  auto block = stub::blocks.upper_bound(wanted);
  if (block == stub::blocks.begin() || wanted >= (--block)->first + block->second.bytes) return cudaSuccess;
  found->devicePointer = found->hostPointer;
  found->type = block->second.device == stub::PINNED ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  if (block->second.device != stub::PINNED) found->device = block->second.device;
  return cudaSuccess;
}

EXPORT cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t) {
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(to, value, bytes);
}
