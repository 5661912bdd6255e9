// Any body by its Content-Encoding is unpacked within what was held for it, or an error of one line. The first byte
// chooses the encoding.
#include "encoding.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size == 0) {
        return 0;
    }
    constexpr std::uint64_t most = 1U << 20U;
    constexpr std::array<std::string_view, 3> encodings{"gzip", "x-gzip", "deflate"};
    const std::string_view body(reinterpret_cast<const char*>(data) + 1, size - 1);
    std::uint64_t held = 0;
    const auto check_message = [](const std::exception& error) {
        if (std::strchr(error.what(), '\n') != nullptr || std::strlen(error.what()) > 4096) {
            std::abort();
        }
    };
    try {
        const auto result = trtdet::serve::unpacked(
            body, encodings[data[0] % encodings.size()], most, [&held](std::uint64_t bytes) { held = bytes; });
        if (result.size() > most || result.capacity() > held) {
            std::abort();
        }
    } catch (const trtdet::serve::EncodingError& error) {
        check_message(error);
    } catch (const trtdet::serve::BodyTooLargeError& error) {
        check_message(error);
    }
    return 0;
}
