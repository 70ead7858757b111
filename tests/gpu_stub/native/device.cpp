// Devices: how many, which one is current, what they are called. Their names begin with "CUDA stub", whatever
// the environment says, so that no record of a run on them can pass for one of a GPU.
#include "device.h"

#include <algorithm>
#include <cstdio>
#include <vector>

#include "settings.h"

namespace stub {
namespace {

thread_local int current = 0;
thread_local cudaError_t last_error = cudaSuccess;

// Which device a word of CUDA_VISIBLE_DEVICES means: an index, GPU-<uuid> or MIG-<uuid>; -1: none.
int device_of(const std::string& word, int count) {
  if (word.rfind("GPU-", 0) == 0 || word.rfind("MIG-", 0) == 0) {
    const std::string digits = word.substr(4);
    const size_t dash = digits.rfind('-');
    const int device = std::atoi(digits.substr(dash == std::string::npos ? 0 : dash + 1).c_str());
    return device < count ? device : -1;
  }
  char* end = nullptr;
  const long device = std::strtol(word.c_str(), &end, 10);
  return end != word.c_str() && *end == 0 && device >= 0 && device < count ? static_cast<int>(device) : -1;
}

}  // namespace

// As the driver reads CUDA_VISIBLE_DEVICES: words count up to the first that names no device; one that is
// named twice makes the whole list invalid.
std::vector<int> visible() {
  const int count = static_cast<int>(number("CUDA_STUB_DEVICES", 2));
  std::vector<int> found;
  const char* listed = text("CUDA_VISIBLE_DEVICES");
  if (!listed) {
    for (int device = 0; device < count; device++) found.push_back(device);
    return found;
  }
  std::string word;
  for (const char c : std::string(listed) + ",") {
    if (c == ' ') continue;
    if (c != ',') {
      word += c;
      continue;
    }
    const int device = device_of(word, count);
    if (device < 0) break;
    if (std::find(found.begin(), found.end(), device) != found.end()) return {};
    found.push_back(device);
    word.clear();
  }
  return found;
}

int visible_devices() { return static_cast<int>(visible().size()); }

size_t device_memory_bytes() { return number("CUDA_STUB_MEMORY_BYTES", 80ull << 30); }

int current_device() { return current; }

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

}  // namespace stub

using stub::remember;

EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (stub::number("CUDA_STUB_DRIVER_TOO_OLD", 0)) return remember(cudaErrorInsufficientDriver);
  *count = stub::visible_devices();
  return *count ? cudaSuccess : remember(cudaErrorNoDevice);
}

EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = stub::current;
  return cudaSuccess;
}

EXPORT cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= stub::visible_devices()) return remember(cudaErrorInvalidDevice);
  stub::current = device;
  return cudaSuccess;
}

// 0 is what the runtime says without a driver; an old one is a version below the runtime's.
EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  *version = stub::number("CUDA_STUB_DRIVER_TOO_OLD", 0) ? 12020 : 13000;
  return cudaSuccess;
}

EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

// The limits are those of a device of compute capability 8.0, which every CUDA 13 wheel has code for.
EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  if (device < 0 || device >= stub::visible_devices()) return remember(cudaErrorInvalidDevice);
  std::memset(found, 0, sizeof *found);
  const char* name = stub::text("CUDA_STUB_NAME");
  std::snprintf(found->name, sizeof found->name, name && *name ? "CUDA stub %s" : "CUDA stub", name);
  const int number = stub::visible()[device];  // of the machine, whatever the process calls it
  for (int i = 0; i < 16; i++) found->uuid.bytes[i] = static_cast<char>(16 * number + i);
  found->totalGlobalMem = stub::device_memory_bytes();
  found->major = 8;
  found->minor = 0;
  found->multiProcessorCount = 108;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = 2048;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = 166912;
  found->sharedMemPerMultiprocessor = 167936;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->l2CacheSize = 40 << 20;
  found->unifiedAddressing = found->canMapHostMemory = 1;
  found->pciBusID = device;
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (static_cast<int>(attribute)) {
    case cudaDevAttrComputeCapabilityMajor: *value = 8; break;
    case cudaDevAttrMultiProcessorCount: *value = 108; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char* address, int length, int device) {
  std::snprintf(address, length, "0000:%02x:00.0", device);
  return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}

EXPORT cudaError_t cudaGetLastError() {
  const cudaError_t error = stub::last_error;
  stub::last_error = cudaSuccess;
  return error;
}

EXPORT cudaError_t cudaPeekAtLastError() { return stub::last_error; }

EXPORT const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    default: return "error of the CUDA stub";
  }
}

EXPORT const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }
