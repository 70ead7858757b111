// Reductions over the slots of all ranks.
#pragma once
#include "communicator.h"

namespace stub {

// Writes the reduction of `count` elements that begin each rank's slot, in the order of the ranks.
void reduce(const ncclComm& from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t operation);

}  // namespace stub
