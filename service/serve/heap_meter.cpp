#include "heap_meter.hpp"

#include <limits>
#include <utility>

namespace trtdet::serve {
namespace {

constexpr std::size_t granted_at_a_time = 1U << 20U;

// No block is larger; sums of two do not overflow.
constexpr auto most = static_cast<std::size_t>(std::numeric_limits<std::ptrdiff_t>::max()) / 4;

thread_local HeapMeter* meter = nullptr;

}  // namespace

HeapMeter::HeapMeter(std::function<bool(std::size_t)> allow) : allow_(std::move(allow)), outer_(meter) {
    meter = this;
}

HeapMeter::~HeapMeter() {
    meter = outer_;
}

HeapMeter* HeapMeter::current() noexcept {
    return meter;
}

bool HeapMeter::take(std::size_t bytes) noexcept {
    if (bytes > most) {
        refused_ = bytes;
        return false;
    }
    if (held_ + bytes > allowed_) {
        const std::size_t wanted = (held_ + bytes + granted_at_a_time - 1) / granted_at_a_time * granted_at_a_time;
        meter = nullptr;
        const bool allowed = wanted > held_ && allow_(wanted);
        meter = this;
        if (!allowed) {
            refused_ = held_ + bytes;
            return false;
        }
        allowed_ = wanted;
    }
    held_ += bytes;
    return true;
}

}  // namespace trtdet::serve
