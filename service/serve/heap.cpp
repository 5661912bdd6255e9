// The program's heap: malloc() of the C library with a meter for what decoders take, and operator new with spare memory
// for what is small. The other forms of new and delete, but those for types of an alignment of their own, end in these.
#include <malloc.h>

#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <new>

#include "heap_meter.hpp"
#include "spare_memory.hpp"

// A sanitizer has its own malloc().
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define TRTDET_METERED_HEAP
#endif

#ifdef TRTDET_METERED_HEAP

// Replaced as glibc's manual allows it ("Replacing malloc"); these are what glibc itself calls.
extern "C" {
void* __libc_malloc(std::size_t size);                     // NOLINT
void* __libc_calloc(std::size_t count, std::size_t size);  // NOLINT
void* __libc_realloc(void* block, std::size_t size);       // NOLINT
void __libc_free(void* block);                             // NOLINT
}

namespace {

// Whether the thread may take so many bytes; without them, errno says why.
bool may_take(std::size_t bytes) noexcept {
    auto* const meter = trtdet::serve::HeapMeter::current();
    if (meter == nullptr || meter->take(bytes)) {
        return true;
    }
    errno = ENOMEM;
    return false;
}

void was_given(std::size_t bytes) noexcept {
    if (auto* const meter = trtdet::serve::HeapMeter::current()) {
        meter->give(bytes);
    }
}

// A block is a little larger than it was asked for.
void* counted(void* block, std::size_t asked) noexcept {
    if (block == nullptr) {
        was_given(asked);
    } else if (auto* const meter = trtdet::serve::HeapMeter::current()) {
        meter->note(::malloc_usable_size(block) - asked);
    }
    return block;
}

}  // namespace

extern "C" void* malloc(std::size_t size) {
    return may_take(size) ? counted(__libc_malloc(size), size) : nullptr;
}

extern "C" void* calloc(std::size_t count, std::size_t size) {
    std::size_t bytes = 0;
    if (__builtin_mul_overflow(count, size, &bytes)) {
        errno = ENOMEM;
        return nullptr;
    }
    return may_take(bytes) ? counted(__libc_calloc(count, size), bytes) : nullptr;
}

extern "C" void* realloc(void* block, std::size_t size) {
    if (trtdet::serve::HeapMeter::current() == nullptr) {
        return __libc_realloc(block, size);
    }
    // Both may be there for a moment.
    const std::size_t before = block == nullptr ? 0 : ::malloc_usable_size(block);
    if (!may_take(size)) {
        return nullptr;
    }
    void* const moved = counted(__libc_realloc(block, size), size);
    if (moved != nullptr || size == 0) {
        was_given(before);
    }
    return moved;
}

extern "C" void free(void* block) {
    if (block != nullptr && trtdet::serve::HeapMeter::current() != nullptr) {
        was_given(::malloc_usable_size(block));
    }
    __libc_free(block);
}

#endif

// The thread sanitizer's own tell it where memory is used anew.
#ifndef __SANITIZE_THREAD__

namespace {

// Takes addresses alone until a page of it is written. No constructor has to run for it, nor a destructor: others
// allocate before main() and after it.
alignas(std::max_align_t) unsigned char memory[16U << 20U];
trtdet::serve::SpareMemory spare(memory, sizeof memory);

}  // namespace

// A sanitizer has one of its own, whose blocks are not for free().
void* operator new(std::size_t size, const std::nothrow_t& /*tag*/) noexcept {
    void* const block = std::malloc(size > 0 ? size : 1);
    return block != nullptr ? block : spare.take(size);
}

void* operator new(std::size_t size) {
    if (void* const block = operator new(size, std::nothrow)) {
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

void operator delete(void* block, const std::nothrow_t& /*tag*/) noexcept {
    operator delete(block);
}

#endif
