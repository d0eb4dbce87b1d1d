#include "tests/faults/illegal_access.h"

namespace sluice {

void WriteToIllegalAddress() {}

}  // namespace sluice
