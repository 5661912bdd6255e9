#include "encoding.hpp"

#include <zlib.h>

#include <algorithm>
#include <new>

namespace trtdet::serve {
namespace {

constexpr std::size_t step = 256 * 1024;

// zlib's state, whose end needs no memory.
class Inflater {
public:
    // with_header: zlib's or gzip's; else none.
    explicit Inflater(bool with_header) {
        constexpr int window = 15;
        constexpr int either_header = 32;
        if (::inflateInit2(&stream, with_header ? window + either_header : -window) != Z_OK) {
            throw std::bad_alloc();
        }
    }
    ~Inflater() { ::inflateEnd(&stream); }

    Inflater(const Inflater&) = delete;
    Inflater& operator=(const Inflater&) = delete;

    z_stream stream{};
};

BodyTooLargeError too_large(std::uint64_t most) {
    return BodyTooLargeError(
        "the body has more than the " + std::to_string(most) + " bytes that are allowed without its Content-Encoding");
}

}  // namespace

bool is_packing(std::string_view encoding) {
    return encoding == "gzip" || encoding == "x-gzip" || encoding == "deflate";
}

std::string unpacked(
    std::string_view body, std::string_view encoding, std::uint64_t most,
    const std::function<void(std::uint64_t)>& hold) {
    // What is called deflate has zlib's header, and some clients leave it out; its first byte is 8 in the low bits.
    const bool bare =
        encoding == "deflate" && !body.empty() && (static_cast<unsigned char>(body[0]) & 15U) != Z_DEFLATED;
    Inflater inflater(!bare);
    auto& stream = inflater.stream;
    std::string result;
    int status = Z_OK;
    while (status == Z_OK) {
        if (result.size() > most) {
            throw too_large(most);
        }
        const std::size_t room = std::min<std::uint64_t>(step, most + 1 - result.size());
        if (result.capacity() < result.size() + room) {
            const std::size_t wanted = std::min<std::uint64_t>(most + 1, std::max(2 * result.size(), 2 * step));
            hold(result.capacity() + wanted);  // both are there for a moment
            result.reserve(wanted);
            hold(wanted);
        }
        const std::size_t before = result.size();
        result.resize(before + room);
        const std::size_t taken = std::min<std::size_t>(body.size(), 1U << 30U);
        stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(body.data()));
        stream.avail_in = static_cast<uInt>(taken);
        stream.next_out = reinterpret_cast<Bytef*>(result.data() + before);
        stream.avail_out = static_cast<uInt>(room);
        status = ::inflate(&stream, Z_NO_FLUSH);
        body.remove_prefix(taken - stream.avail_in);
        result.resize(before + room - stream.avail_out);
        if (status == Z_BUF_ERROR && !body.empty()) {
            status = Z_OK;
        }
    }
    if (status == Z_STREAM_END && result.size() > most) {
        throw too_large(most);
    }
    if (status == Z_MEM_ERROR) {
        throw std::bad_alloc();
    }
    if (status != Z_STREAM_END) {
        throw EncodingError(
            "the body is not what its Content-Encoding " + std::string(encoding) + " says, or is cut; send it whole");
    }
    if (!body.empty()) {
        throw EncodingError("something follows the end of the body by its Content-Encoding " + std::string(encoding));
    }
    return result;
}

}  // namespace trtdet::serve
