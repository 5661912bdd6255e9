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

// Where the time of a request went, for each of its images on average: they are worked on at the same time.
struct ImageTimes {
    Clock::duration input{};  // decoding and pre-processing, or taking a tensor
    Clock::duration queue{};  // waiting for a batch
    Clock::duration infer{};  // the run of the batch
};

struct ModelCounts {
    Spent success;                                 // requests that were answered with detections, from their last byte
    Spent fail;                                    // and those that were not
    Spent input, queue, infer;                     // as ImageTimes, of those that were answered with detections
    std::map<int, Spent> batches;                  // images by the size of their batch, with its run
    std::chrono::system_clock::time_point last{};  // image; 1970 where there was none

    std::uint64_t images() const {
        std::uint64_t count = 0;
        for (const auto& [size, images] : batches) {
            count += images.count;
        }
        return count;
    }

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
    void succeeded(Clock::duration took, const ImageTimes& times) {
        const std::lock_guard lock(mutex_);
        counts_.success.add(took);
        counts_.input.add(times.input);
        counts_.queue.add(times.queue);
        counts_.infer.add(times.infer);
    }

    void failed(Clock::duration took) {
        const std::lock_guard lock(mutex_);
        counts_.fail.add(took);
    }

    // An image was found.
    void image(Clock::duration ran, int batch) {
        const std::lock_guard lock(mutex_);
        counts_.batches[batch].add(ran);
        counts_.last = std::chrono::system_clock::now();
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
