// Bodies that are compressed for the way (RFC 9110, 8.4).
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace trtdet::serve {

// A body that is not what its Content-Encoding says.
class EncodingError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// A body that is larger than allowed without its Content-Encoding.
class BodyTooLargeError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// Whether a Content-Encoding is one that unpacked() takes: gzip, x-gzip, deflate.
bool is_packing(std::string_view encoding);

// A body without its Content-Encoding.
//
// most: bytes of the result. hold: told how many bytes it will have taken, before it takes them; what it throws ends
// the work.
//
// Throws EncodingError, BodyTooLargeError.
std::string unpacked(
    std::string_view body, std::string_view encoding, std::uint64_t most,
    const std::function<void(std::uint64_t bytes)>& hold);

}  // namespace trtdet::serve
