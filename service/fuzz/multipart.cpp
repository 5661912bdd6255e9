// Any header and body are parts that lie within the body, or a MultipartError of one line. The first line is the
// header.
#include "multipart.hpp"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string_view input(reinterpret_cast<const char*>(data), size);
    const std::size_t line = input.find('\n');
    if (line == std::string_view::npos) {
        return 0;
    }
    const std::string_view body = input.substr(line + 1);
    try {
        const std::string boundary = trtdet::serve::multipart_boundary(input.substr(0, line));
        const auto parts = trtdet::serve::parse_multipart(body, boundary, {4, 200});
        const char* after = body.data();
        for (const trtdet::serve::Part& part : parts) {
            // In their order, one after the other.
            const bool inside = std::less_equal<>()(after, part.body.data()) &&
                                std::less_equal<>()(part.body.data() + part.body.size(), body.data() + body.size());
            if (!inside || part.body.find("\r\n--" + boundary + "\r\n") != std::string_view::npos) {
                std::abort();
            }
            after = part.body.data() + part.body.size();
        }
        if (parts.empty() || parts.size() > 4) {
            std::abort();
        }
    } catch (const trtdet::serve::MultipartError& error) {
        if (std::strchr(error.what(), '\n') != nullptr || std::strlen(error.what()) > 4096) {
            std::abort();
        }
    }
    return 0;
}
