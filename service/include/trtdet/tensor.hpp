// What an engine reads and writes: elements of a type that is only known when it runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "trtdet/bundle.hpp"
#include "trtdet/errors.hpp"
#include "trtdet/span.hpp"

namespace trtdet {

// The type of elements that C++ has as well; float16 it has not.
template <typename T>
constexpr DType element_type() {
    if constexpr (std::is_same_v<T, float>) {
        return DType::float32;
    } else if constexpr (std::is_same_v<T, std::int32_t>) {
        return DType::int32;
    } else if constexpr (std::is_same_v<T, std::int64_t>) {
        return DType::int64;
    } else if constexpr (std::is_same_v<T, std::int8_t>) {
        return DType::int8;
    } else if constexpr (std::is_same_v<T, std::uint8_t>) {
        return DType::uint8;
    } else {
        static_assert(std::is_same_v<T, bool>, "no tensor has elements of this type");
        return DType::boolean;
    }
}

// The elements of a tensor, held by somebody else.
class TensorView {
public:
    template <typename T, typename = std::enable_if_t<std::is_arithmetic_v<T>>>
    TensorView(Span<const T> elements)
        : dtype_(element_type<T>()), data_(elements.data()), bytes_(elements.size() * sizeof(T)) {}

    // Memory that elements of the type may lie in.
    TensorView(DType dtype, const void* data, std::size_t bytes) : dtype_(dtype), data_(data), bytes_(bytes) {}

    DType dtype() const { return dtype_; }
    Span<const std::byte> bytes() const { return {static_cast<const std::byte*>(data_), bytes_}; }

    // Throws EngineError: they are of another type.
    template <typename T>
    Span<const T> as() const {
        if (dtype_ != element_type<T>()) {
            throw EngineError("the elements of a tensor were asked for as another type than they are of");
        }
        return {static_cast<const T*>(data_), bytes_ / sizeof(T)};
    }

private:
    DType dtype_;
    const void* data_;
    std::size_t bytes_;
};

}  // namespace trtdet
