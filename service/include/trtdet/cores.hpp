// How many cores the process may use.
#pragma once

#include <filesystem>

#include "trtdet/export.hpp"

namespace trtdet {

// Those that the kernel runs it on, or as many as the quotas of its control groups are worth where that is less: in a
// container with a limit of two the machine's 64 cores are of no use, and as many threads would wait for each other.
//
// root: where /proc and /sys are.
TRTDET_API int usable_cores(const std::filesystem::path& root = "/");

}  // namespace trtdet
