// Counts every byte that torch's CPU allocator serves: the CPU counterpart of
// torch.cuda.memory_allocated and torch.cuda.max_memory_allocated. A limit makes it refuse as a full device does.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#ifdef __APPLE__
#include <malloc/malloc.h>
#else
#include <malloc.h>
#endif

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace {

std::atomic<long long> allocated{0};
// Of blocks served in passing: their sizes as the C library rounds them.
std::atomic<long long> in_passing{0};
std::atomic<long long> peak{0};
// 0: none.
std::atomic<long long> limit{0};
std::mutex guard;
// Blocks lie just where torch's own allocator puts them, so that later steps run at their usual speed;
// sizes are kept beside them. Never destroyed: tensors may be freed after static destructors have run.
std::unordered_map<const void*, long long>& served = *new std::unordered_map<const void*, long long>;

void raise_peak(long long now) {
  long long highest = peak.load();
  while (now > highest && !peak.compare_exchange_weak(highest, now)) {
  }
}

long long size_of_block(void* data) {
#ifdef __APPLE__
  return static_cast<long long>(malloc_size(data));
#else
  return static_cast<long long>(malloc_usable_size(data));
#endif
}

void release_in_passing(void* data) {
  if (data == nullptr) return;
  in_passing -= size_of_block(data);
  c10::free_cpu(data);
}

void release(void* data) {
  if (data == nullptr) return;
  {
    std::lock_guard<std::mutex> lock(guard);
    const auto entry = served.find(data);
    allocated -= entry->second;
    served.erase(entry);
  }
  c10::free_cpu(data);
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    const long long asked = static_cast<long long>(bytes);
    const long long now = (allocated += asked);
    const long long most = limit.load();
    if (most > 0 && now > most) {
      allocated -= asked;
      // Not every thread keeps the type of an error: the text has torch's own words too.
      TORCH_CHECK_WITH(OutOfMemoryError, false, "can't allocate memory: tried to allocate ", asked, " bytes with ",
                       now - asked, " allocated of a limit of ", most, " bytes");
    }
    void* data = c10::alloc_cpu(bytes);
    if (data == nullptr) return {nullptr, nullptr, &release, cpu};
    {
      std::lock_guard<std::mutex> lock(guard);
      served.emplace(data, asked);
    }
    raise_peak(now + in_passing.load());
    return {data, data, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

// Keeps no sizes of its own, so that a timed step can bear it: two additions per block.
class PassingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    void* data = c10::alloc_cpu(bytes);
    if (data == nullptr) return {nullptr, nullptr, &release_in_passing, cpu};
    const long long size = size_of_block(data);
    raise_peak((in_passing += size) + allocated.load());
    return {data, data, &release_in_passing, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_in_passing; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

CountingAllocator counting_allocator;
PassingAllocator passing_allocator;

}  // namespace

extern "C" {
void harness_install_allocator() { c10::SetCPUAllocator(&counting_allocator, 255); }
// From here on in passing.
void harness_count_in_passing() { c10::SetCPUAllocator(&passing_allocator, 255); }
// Bytes above which allocations fail; 0: none.
void harness_set_limit(long long bytes) { limit = bytes; }
long long harness_allocated_bytes() { return allocated + in_passing; }
long long harness_peak_bytes() { return peak; }
// Whether this block is counted: not if it was allocated before, or mapped from a file.
int harness_serves(const void* data) {
  std::lock_guard<std::mutex> lock(guard);
  return served.count(data) ? 1 : 0;
}
void harness_reset_peak() { peak = allocated + in_passing; }
}
