// Kernels: registered, launched, and never run. operators.cpp computes what torch's operators would.
// CUDA_STUB_LOG lists the launches that remain: results of those are garbage.
#include <cuda.h>

#include <map>
#include <mutex>

#include "device.h"
#include "settings.h"

namespace {

std::mutex guard;
std::map<const void*, std::string> kernels;

cudaError_t launch(const void* function) {
  if (!stub::text("CUDA_STUB_LOG")) return cudaSuccess;
  const std::lock_guard<std::mutex> lock(guard);
  const auto found = kernels.find(function);
  const std::string name = found == kernels.end() ? "unknown" : found->second.substr(0, 80);
  stub::log_call(("kernel not run: " + name).c_str(), 0, 0);
  return cudaSuccess;
}

struct LaunchConfiguration {
  dim3 grid, block;
  size_t shared_bytes;
  void* stream;
};
thread_local LaunchConfiguration pushed;

CUresult succeed() { return CUDA_SUCCESS; }
CUresult primary_context_state(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult error_string(CUresult, const char** words) {
  *words = "error of the CUDA stub";
  return CUDA_SUCCESS;
}

}  // namespace

EXPORT cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch(function);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) {
  return launch(function);
}
EXPORT cudaError_t __cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return launch(function);
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void* stream) {
  pushed = {grid, block, shared_bytes, stream};
  return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared_bytes = pushed.shared_bytes;
  *static_cast<void**>(stream) = pushed.stream;
  return cudaSuccess;
}

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle[8];
  return handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORT void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*, void*, void*,
                                   void*, int*) {
  if (!stub::text("CUDA_STUB_LOG")) return;
  const std::lock_guard<std::mutex> lock(guard);
  kernels[function] = name;
}

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
  std::memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                          unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

// torch asks the runtime for functions of the driver; there is none behind it.
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                                    unsigned long long, cudaDriverEntryPointQueryResult* result) {
  const std::string wanted(name);
  if (wanted == "cuDevicePrimaryCtxGetState") {
    *function = reinterpret_cast<void*>(primary_context_state);
  } else if (wanted == "cuGetErrorString") {
    *function = reinterpret_cast<void*>(error_string);
  } else {
    *function = reinterpret_cast<void*>(succeed);
  }
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
