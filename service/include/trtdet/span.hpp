// Elements that somebody else holds, one after the other: what std::span is from C++20 on.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

namespace trtdet {

template <typename T>
class Span {
public:
    Span() = default;
    Span(T* data, std::size_t size) : data_(data), size_(size) {}

    // A std::vector, std::array or std::string, or a span of what is less constant.
    template <
        typename Container,
        typename = std::enable_if_t<std::is_convertible_v<decltype(std::declval<Container&>().data()), T*>>>
    Span(Container&& elements) : data_(elements.data()), size_(elements.size()) {}

    T* data() const { return data_; }
    std::size_t size() const { return size_; }
    bool empty() const { return size_ == 0; }
    T* begin() const { return data_; }
    T* end() const { return data_ + size_; }
    T& operator[](std::size_t index) const { return data_[index]; }

    // So many elements from a place on; both must lie within.
    Span part(std::size_t from, std::size_t count) const { return {data_ + from, count}; }

private:
    T* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace trtdet
