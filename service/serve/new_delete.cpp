// The program's operator new, which has spare memory for what is small. The other forms of new and delete, but those
// for types of an alignment of their own, end in these.
#include <cstddef>
#include <cstdlib>
#include <new>

#include "spare_memory.hpp"

namespace {

// Takes addresses alone until a page of it is written. No constructor has to run for it, nor a destructor: others
// allocate before main() and after it.
alignas(std::max_align_t) unsigned char memory[16U << 20U];
trtdet::serve::SpareMemory spare(memory, sizeof memory);

}  // namespace

void* operator new(std::size_t size) {
    if (void* const block = std::malloc(size > 0 ? size : 1)) {
        return block;
    }
    if (void* const block = spare.take(size)) {
        return block;
    }
    throw std::bad_alloc();
}

void operator delete(void* block) noexcept {
    if (spare.owns(block)) {
        spare.give(block);
    } else {
        std::free(block);
    }
}

void operator delete(void* block, std::size_t /*size*/) noexcept {
    operator delete(block);
}
