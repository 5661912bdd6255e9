#include "spare_memory.hpp"

#include <functional>
#include <new>

namespace trtdet::serve {

void* SpareMemory::take(std::size_t size) noexcept {
    if (size > largest) {
        return nullptr;
    }
    std::size_t kind = 0;
    while (smallest << kind < size) {
        ++kind;
    }
    const std::lock_guard lock(mutex_);
    Header* block = free_[kind];
    if (block != nullptr) {
        free_[kind] = block->next;
        return block + 1;
    }
    const std::size_t whole = sizeof(Header) + (smallest << kind);
    if (whole > bytes_ - used_) {
        return nullptr;
    }
    block = new (memory_ + used_) Header{nullptr, kind};
    used_ += whole;
    return block + 1;
}

bool SpareMemory::owns(const void* block) const noexcept {
    const std::less<const void*> before;
    return !before(block, memory_) && before(block, memory_ + bytes_);
}

void SpareMemory::give(void* block) noexcept {
    Header* const header = static_cast<Header*>(block) - 1;
    const std::lock_guard lock(mutex_);
    header->next = free_[header->kind];
    free_[header->kind] = header;
}

}  // namespace trtdet::serve
