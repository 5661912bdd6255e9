// Memory for small things where there is no more of it.
#pragma once

#include <array>
#include <cstddef>
#include <mutex>

namespace trtdet::serve {

// Blocks of a fixed piece of memory. Libraries allocate where nothing may be thrown, in destructors above all, and end
// the process where that fails: a service that refuses what is large must always have memory for what is small.
class SpareMemory {
public:
    static constexpr std::size_t largest = 4096;  // bytes of a block

    // memory: aligned for any type; it must live longer than this.
    constexpr SpareMemory(unsigned char* memory, std::size_t bytes) noexcept : memory_(memory), bytes_(bytes) {}

    // Of at least so many bytes, aligned for any type; null for more than the largest, or where no block is left.
    void* take(std::size_t size) noexcept;

    bool owns(const void* block) const noexcept;

    // A block that take() gave.
    void give(void* block) noexcept;

private:
    struct alignas(std::max_align_t) Header {
        Header* next = nullptr;  // of the free blocks
        std::size_t kind = 0;
    };

    static constexpr std::size_t smallest = 64;
    static constexpr std::size_t kinds = 7;  // each twice as large as the one before
    static_assert(smallest << (kinds - 1) == largest);

    unsigned char* const memory_;
    const std::size_t bytes_;
    std::mutex mutex_;
    std::array<Header*, kinds> free_{};
    std::size_t used_ = 0;  // of the memory, by blocks that were taken once
};

}  // namespace trtdet::serve
