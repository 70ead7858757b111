// Devices of the stub, shared by the files of its runtime.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>

namespace stub {

int visible_devices();
size_t device_memory_bytes();
int current_device();

// Remembers an error for cudaGetLastError, as the runtime does, and returns it.
cudaError_t remember(cudaError_t error);

}  // namespace stub
