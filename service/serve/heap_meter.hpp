// What a thread takes of the heap, by libraries that have no limit of their own.
#pragma once

#include <cstddef>
#include <functional>

namespace trtdet::serve {

// Counts what the thread that made it takes of the heap until its end, and refuses what is too much: malloc() is
// without memory then. It works in programs that are linked with heap.cpp; in others, and where a sanitizer has
// malloc() for itself, nothing is counted.
class HeapMeter {
public:
    // allow: asked for so many bytes in all whenever it is more than before. It must not throw; what it takes itself is
    // not counted.
    explicit HeapMeter(std::function<bool(std::size_t bytes)> allow);
    ~HeapMeter();

    HeapMeter(const HeapMeter&) = delete;
    HeapMeter& operator=(const HeapMeter&) = delete;

    // Whether something was refused, and how much there would have been.
    bool refused() const { return refused_ > 0; }
    std::size_t refused_bytes() const { return refused_; }

    // For malloc() and free(): the meter of this thread, if there is one.
    static HeapMeter* current() noexcept;
    bool take(std::size_t bytes) noexcept;
    void note(std::size_t bytes) noexcept { held_ += bytes; }  // taken already
    void give(std::size_t bytes) noexcept { held_ = bytes < held_ ? held_ - bytes : 0; }

private:
    const std::function<bool(std::size_t)> allow_;
    HeapMeter* const outer_;
    std::size_t held_ = 0;
    std::size_t allowed_ = 0;
    std::size_t refused_ = 0;
};

}  // namespace trtdet::serve
