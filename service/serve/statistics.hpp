// What a model has done since it is served, as clients of Triton's statistics read it.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>

#include "request.hpp"

namespace trtdet::serve {

// How often something was done, and how long it took in all.
struct Spent {
    std::uint64_t count = 0;
    std::chrono::nanoseconds time{0};

    void add(Clock::duration duration) {
        ++count;
        time += std::chrono::duration_cast<std::chrono::nanoseconds>(duration);
    }
};

struct ModelCounts {
    Spent success;                 // requests that were answered with detections, from their last byte
    Spent fail;                    // and those that were not
    Spent input;                   // images: decoding and pre-processing, of those that are sent as files
    Spent queue;                   // images: waiting for a batch
    Spent infer;                   // images: the run of their batch
    std::map<int, Spent> batches;  // images by the size of their batch, with its run
    std::chrono::system_clock::time_point last{};  // image; 1970 where there was none

    // How many batches were run: each has as many images as its size.
    std::uint64_t executions() const {
        std::uint64_t count = 0;
        for (const auto& [size, images] : batches) {
            count += images.count / static_cast<std::uint64_t>(size);
        }
        return count;
    }
};

// Any thread may call any member at any time.
class Statistics {
public:
    void request(bool success, Clock::duration took) {
        const std::lock_guard lock(mutex_);
        (success ? counts_.success : counts_.fail).add(took);
    }

    // An image was found.
    void image(Clock::duration queued, Clock::duration ran, int batch) {
        const std::lock_guard lock(mutex_);
        counts_.queue.add(queued);
        counts_.infer.add(ran);
        counts_.batches[batch].add(ran);
        counts_.last = std::chrono::system_clock::now();
    }

    void decoded(Clock::duration took) {
        const std::lock_guard lock(mutex_);
        counts_.input.add(took);
    }

    ModelCounts counts() const {
        const std::lock_guard lock(mutex_);
        return counts_;
    }

private:
    mutable std::mutex mutex_;
    ModelCounts counts_;
};

}  // namespace trtdet::serve
