#include <cstddef>
#include <cstdint>
#include <opencv2/core.hpp>
#include <string_view>
#include <utility>

#include "trtdet/image.hpp"

namespace trtdet {

namespace {

using namespace std::string_view_literals;

// Reads numbers of a file, in either order of bytes; 0 past its end.
class Numbers {
public:
    Numbers(std::string_view bytes, bool big) : bytes_(bytes), big_(big) {}

    std::uint32_t two(std::size_t at) const { return read(at, 2); }
    std::uint32_t four(std::size_t at) const { return read(at, 4); }

private:
    std::uint32_t read(std::size_t at, std::size_t count) const {
        if (at > bytes_.size() || bytes_.size() - at < count) {
            return 0;
        }
        std::uint32_t number = 0;
        for (std::size_t i = 0; i < count; ++i) {
            number = number << 8U | static_cast<std::uint8_t>(bytes_[big_ ? at + i : at + count - 1 - i]);
        }
        return number;
    }

    std::string_view bytes_;
    bool big_;
};

std::string_view part(std::string_view bytes, std::size_t at, std::size_t size) {
    return at > bytes.size() ? std::string_view() : bytes.substr(at, size);
}

// The segment, chunk or block of a file that holds its EXIF data; empty where there is none.
std::string_view exif_of(std::string_view bytes) {
    const Numbers big(bytes, true);
    if (part(bytes, 0, 2) == "\xff\xd8"sv) {
        // Up to the pixels: what comes after them says nothing.
        for (std::size_t at = 2; part(bytes, at, 1) == "\xff"sv && part(bytes, at, 2) != "\xff\xda"sv;) {
            const std::size_t size = big.two(at + 2);
            if (size < 2) {
                break;
            }
            const auto data = part(bytes, at + 4, size - 2);
            if (part(bytes, at, 2) == "\xff\xe1"sv && part(data, 0, 6) == "Exif\0\0"sv) {
                return data.substr(6);
            }
            at += 2 + size;
        }
        return {};
    }
    if (part(bytes, 0, 8) == "\x89PNG\r\n\x1a\n"sv) {
        for (std::size_t at = 8; at + 12 <= bytes.size(); at += std::size_t{12} + big.four(at)) {
            if (part(bytes, at + 4, 4) == "eXIf"sv) {
                return part(bytes, at + 8, big.four(at));
            }
        }
        return {};
    }
    const Numbers little(bytes, false);
    if (part(bytes, 0, 4) == "RIFF"sv && part(bytes, 8, 4) == "WEBP"sv) {
        for (std::size_t at = 12; at + 8 <= bytes.size();) {
            const std::size_t size = little.four(at + 4);
            if (part(bytes, at, 4) == "EXIF"sv) {
                const auto data = part(bytes, at + 8, size);
                return part(data, 0, 6) == "Exif\0\0"sv ? data.substr(6) : data;
            }
            at += 8 + size + size % 2;
        }
    }
    return {};
}

}  // namespace

int exif_orientation(std::string_view bytes) {
    const auto tiff = exif_of(bytes);
    const bool big = part(tiff, 0, 4) == "MM\0*"sv;
    if (!big && part(tiff, 0, 4) != "II*\0"sv) {
        return 1;
    }
    constexpr std::uint32_t orientation_tag = 0x0112;
    constexpr std::uint32_t short_type = 3;
    const Numbers numbers(tiff, big);
    const std::size_t first = numbers.four(4);
    const std::size_t count = numbers.two(first);
    for (std::size_t i = 0; i < count; ++i) {
        const std::size_t entry = first + 2 + 12 * i;
        if (numbers.two(entry) == orientation_tag && numbers.two(entry + 2) == short_type) {
            const auto value = numbers.two(entry + 8);
            return value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
        }
    }
    return 1;
}

Image upright(Image image, int orientation) {
    if (orientation < 2 || orientation > 8) {
        return image;
    }
    if (orientation >= 5) {
        Image turned{image.height, image.width, std::vector<std::uint8_t>(image.pixels.size())};
        const cv::Mat from(image.height, image.width, CV_8UC3, image.pixels.data());
        cv::Mat to(turned.height, turned.width, CV_8UC3, turned.pixels.data());
        cv::transpose(from, to);
        image = std::move(turned);
    }
    constexpr int around_both = -1, up_down = 0, left_right = 1;
    cv::Mat pixels(image.height, image.width, CV_8UC3, image.pixels.data());
    switch (orientation) {
        case 2:
        case 6:
            cv::flip(pixels, pixels, left_right);
            break;
        case 3:
        case 7:
            cv::flip(pixels, pixels, around_both);
            break;
        case 4:
        case 8:
            cv::flip(pixels, pixels, up_down);
            break;
        default:
            break;
    }
    return image;
}

}  // namespace trtdet
