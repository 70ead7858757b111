// Streams and events. All work is done when a call returns, so an event holds the time of its recording and a
// stream is always idle, until the device is stopped: then no stream becomes idle again.
#include <time.h>
#include <unistd.h>

#include <atomic>

#include "device.h"
#include "settings.h"

namespace {

std::atomic<bool> stopped{false};

double milliseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

cudaError_t synchronise(const char* call) {
  stub::log_call(call, 0, 0);
  while (stopped) usleep(10000);
  return cudaSuccess;
}

cudaError_t query() { return stopped ? cudaErrorNotReady : cudaSuccess; }

cudaError_t create(cudaStream_t* stream) {
  *stream = reinterpret_cast<cudaStream_t>(std::calloc(1, 64));
  return cudaSuccess;
}

}  // namespace

EXPORT void cuda_stub_stop_device() { stopped = true; }
EXPORT void cuda_stub_mark(const char* name) { stub::log_call(name, 0, 0); }

EXPORT cudaError_t cudaDeviceSynchronize() { return synchronise("cudaDeviceSynchronize"); }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t) { return synchronise("cudaStreamSynchronize"); }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t) { return synchronise("cudaEventSynchronize"); }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t) { return query(); }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t) { return query(); }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }

EXPORT cudaError_t cudaStreamCreate(cudaStream_t* stream) { return create(stream); }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return create(stream); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return create(stream); }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

// No graph is ever captured.
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                            cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                            size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  return cudaSuccess;
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = reinterpret_cast<cudaEvent_t>(std::calloc(1, 64));
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
  std::free(event);
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  *reinterpret_cast<double*>(event) = milliseconds();
  return cudaSuccess;
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}
EXPORT cudaError_t cudaEventElapsedTime(float* elapsed, cudaEvent_t begin, cudaEvent_t end) {
  *elapsed = static_cast<float>(*reinterpret_cast<double*>(end) - *reinterpret_cast<double*>(begin));
  return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  function(data);
  return cudaSuccess;
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  function(stream, cudaSuccess, data);
  return cudaSuccess;
}
