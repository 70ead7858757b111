// Elements are added as doubles and rounded once: a GPU rounds at each hop, so values differ in the last bits.
#include "reduction.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>

#include "settings.h"

namespace stub {
namespace {

struct Bfloat16 {
  uint16_t bits;
  operator double() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  explicit Bfloat16(double value) {
    const float narrow = static_cast<float>(value);
    uint32_t wide;
    std::memcpy(&wide, &narrow, sizeof wide);
    if (!std::isnan(narrow)) wide += 0x7fff + ((wide >> 16) & 1);  // to nearest, ties to even
    bits = static_cast<uint16_t>(wide >> 16);
  }
};

// Factors of ncclRedOpCreatePreMulSum, by the operation that it made.
std::mutex guard;
std::map<int, double> factors;
int next_operation = ncclNumOps;

double factor_of(ncclRedOp_t operation) {
  const std::lock_guard<std::mutex> lock(guard);
  const auto found = factors.find(operation);
  return found == factors.end() ? 1.0 : found->second;
}

template <typename Element>
void reduce_as(const ncclComm& from, void* to, size_t count, ncclRedOp_t operation) {
  const double factor = factor_of(operation);
  Element* const result = static_cast<Element*>(to);
  for (size_t i = 0; i < count; i++) {
    double value = reinterpret_cast<const Element*>(from.slot(0))[i];
    for (int rank = 1; rank < from.size; rank++) {
      const double other = reinterpret_cast<const Element*>(from.slot(rank))[i];
      switch (operation) {
        case ncclProd: value *= other; break;
        case ncclMax: value = std::max(value, other); break;
        case ncclMin: value = std::min(value, other); break;
        default: value += other;
      }
    }
    result[i] = static_cast<Element>(operation == ncclAvg ? value / from.size : value * factor);
  }
}

double scalar(const void* at, ncclDataType_t type) {
  switch (type) {
    case ncclFloat64: return *static_cast<const double*>(at);
    case ncclFloat16: return *static_cast<const _Float16*>(at);
    case ncclBfloat16: return *static_cast<const Bfloat16*>(at);
    default: return *static_cast<const float*>(at);
  }
}

}  // namespace

void reduce(const ncclComm& from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation) {
  switch (type) {
    case ncclFloat32: return reduce_as<float>(from, to, count, operation);
    case ncclFloat64: return reduce_as<double>(from, to, count, operation);
    case ncclFloat16: return reduce_as<_Float16>(from, to, count, operation);
    case ncclBfloat16: return reduce_as<Bfloat16>(from, to, count, operation);
    case ncclInt64: return reduce_as<int64_t>(from, to, count, operation);
    case ncclUint64: return reduce_as<uint64_t>(from, to, count, operation);
    case ncclInt32: return reduce_as<int32_t>(from, to, count, operation);
    case ncclUint32: return reduce_as<uint32_t>(from, to, count, operation);
    case ncclInt8: return reduce_as<int8_t>(from, to, count, operation);
    default: return reduce_as<uint8_t>(from, to, count, operation);
  }
}

size_t element_bytes(ncclDataType_t type) {
  switch (type) {
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclFloat32: case ncclInt32: case ncclUint32: return 4;
    case ncclFloat64: case ncclInt64: case ncclUint64: return 8;
    default: return 1;
  }
}

}  // namespace stub

EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* operation, void* factor, ncclDataType_t type,
                                             ncclScalarResidence_t, ncclComm_t) {
  const std::lock_guard<std::mutex> lock(stub::guard);
  stub::factors[stub::next_operation] = stub::scalar(factor, type);
  *operation = static_cast<ncclRedOp_t>(stub::next_operation++);
  return ncclSuccess;
}
EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }
