#include "trtdet/cores.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <thread>

namespace trtdet {
namespace {

namespace fs = std::filesystem;

// The first words of a file; empty where it cannot be read, or they are no number, as "max" is none.
std::optional<double> ratio(std::istream&& quota, std::istream&& period) {
    double some = 0;
    double of = 0;
    return quota >> some && period >> of && some > 0 && of > 0 ? std::optional(some / of) : std::nullopt;
}

// Of version 2: "200000 100000", microseconds of time in each period, or "max 100000".
std::optional<double> cores_of(const fs::path& folder) {
    std::ifstream limit(folder / "cpu.max");
    std::string quota, period;
    limit >> quota >> period;
    return ratio(std::istringstream(quota), std::istringstream(period));
}

// Of version 1, where the quota is -1 without a limit.
std::optional<double> cores_of_old(const fs::path& folder) {
    return ratio(std::ifstream(folder / "cpu.cfs_quota_us"), std::ifstream(folder / "cpu.cfs_period_us"));
}

// The smallest of a group and of those that it is in.
template <typename Read>
double least(const fs::path& mount, const fs::path& group, Read&& read) {
    double found = std::numeric_limits<double>::infinity();
    for (auto part = group.relative_path();; part = part.parent_path()) {
        if (const auto cores = read(part.empty() ? mount : mount / part)) {
            found = std::min(found, *cores);
        }
        if (part.empty()) {
            return found;
        }
    }
}

}  // namespace

int usable_cores(const fs::path& root) {
    double cores = std::max(1U, std::thread::hardware_concurrency());
    std::ifstream groups(root / "proc/self/cgroup");
    // Such as "0::/a/b" of version 2, or "4:cpu,cpuacct:/a/b".
    for (std::string line; std::getline(groups, line);) {
        const auto first = line.find(':');
        const auto second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) {
            continue;
        }
        const auto kinds = line.substr(first + 1, second - first - 1);
        const auto group = line.substr(second + 1);
        if (kinds.empty()) {
            cores = std::min(cores, least(root / "sys/fs/cgroup", group, cores_of));
        } else if (("," + kinds + ",").find(",cpu,") != std::string::npos) {
            cores = std::min(cores, least(root / "sys/fs/cgroup" / kinds, group, cores_of_old));
            cores = std::min(cores, least(root / "sys/fs/cgroup/cpu", group, cores_of_old));
        }
    }
    return std::max(1, static_cast<int>(std::ceil(cores)));
}

}  // namespace trtdet
