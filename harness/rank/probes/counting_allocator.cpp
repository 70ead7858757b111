// Counts every byte that torch's CPU allocator serves: the CPU counterpart of
// torch.cuda.memory_allocated and torch.cuda.max_memory_allocated. A limit makes it refuse as a full device does.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace {

std::atomic<long long> allocated{0};
std::atomic<long long> peak{0};
// 0: none.
std::atomic<long long> limit{0};
std::mutex guard;
// Blocks lie just where torch's own allocator puts them, so that later steps run at their usual speed;
// sizes are kept beside them. Never destroyed: tensors may be freed after static destructors have run.
std::unordered_map<const void*, long long>& served = *new std::unordered_map<const void*, long long>;

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
    long long highest = peak.load();
    while (now > highest && !peak.compare_exchange_weak(highest, now)) {
    }
    return {data, data, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

CountingAllocator counting_allocator;

}  // namespace

extern "C" {
void harness_install_allocator() { c10::SetCPUAllocator(&counting_allocator, 255); }
void harness_remove_allocator() { c10::SetCPUAllocator(c10::GetDefaultCPUAllocator(), 255); }
// Bytes above which allocations fail; 0: none.
void harness_set_limit(long long bytes) { limit = bytes; }
long long harness_allocated_bytes() { return allocated; }
long long harness_peak_bytes() { return peak; }
// Whether this block is counted: not if it was allocated before, or mapped from a file.
int harness_serves(const void* data) {
  std::lock_guard<std::mutex> lock(guard);
  return served.count(data) ? 1 : 0;
}
void harness_reset_peak() { peak = allocated.load(); }
}
