// Any bytes are an image, which is placed whole, or an ImageError of one line. The first byte chooses the rule.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string_view>

#include <zlib.h>

#include "trtdet/errors.hpp"
#include "trtdet/image.hpp"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t most);

// After each change the checksums of a PNG file's chunks are made right again: no change would get past them otherwise.
extern "C" std::size_t LLVMFuzzerCustomMutator(
    std::uint8_t* data, std::size_t size, std::size_t most, unsigned int /* seed */) {
    size = LLVMFuzzerMutate(data, size, most);
    constexpr std::size_t head = 8;  // length and kind of a chunk
    std::size_t at = 1 + 8;
    if (size < at || std::memcmp(data + 1, "\x89PNG", 4) != 0) {
        return size;
    }
    while (size - at >= head + 4) {
        std::size_t length = 0;
        for (std::size_t index = 0; index < 4; ++index) {
            length = length << 8 | data[at + index];
        }
        if (length > size - at - head - 4) {
            break;
        }
        const auto sum = crc32(0, data + at + 4, static_cast<unsigned int>(length + 4));
        for (std::size_t index = 0; index < 4; ++index) {
            data[at + head + length + index] = static_cast<std::uint8_t>(sum >> (24 - 8 * index));
        }
        at += head + length + 4;
    }
    return size;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size == 0) {
        return 0;
    }
    trtdet::Preprocess rule;
    rule.height = 40;
    rule.width = 56;
    rule.resize = static_cast<trtdet::Resize>(data[0] % 3);
    rule.interpolation = static_cast<trtdet::Interpolation>(data[0] / 3 % 4);
    rule.color = static_cast<trtdet::Color>(data[0] / 12 % 2);
    try {
        const trtdet::ImageLimits limits{1 << 20, 4096};
        const std::string_view file(reinterpret_cast<const char*>(data) + 1, size - 1);
        const trtdet::Image image = trtdet::upright(trtdet::decode_image(file, limits), trtdet::exif_orientation(file));
        // NaN where nothing was written.
        std::vector<float> input(3 * 40 * 56, std::numeric_limits<float>::quiet_NaN());
        const trtdet::Placement placement = trtdet::preprocess(image, rule, input.data());
        const bool whole =
            std::all_of(input.begin(), input.end(), [](float value) { return value >= 0 && value <= 255; });
        const trtdet::Box box = placement.to_image({-10, -10, 100, 100});
        if (!whole || box.x1 != 0 || box.x2 > static_cast<float>(image.width) ||
            box.y2 > static_cast<float>(image.height)) {
            std::abort();
        }
    } catch (const trtdet::ImageError& error) {
        if (std::strchr(error.what(), '\n') != nullptr || std::strlen(error.what()) > 4096) {
            std::abort();
        }
    }
    return 0;
}
