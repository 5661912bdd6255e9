// Image files made by hand, as nothing here encodes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

namespace trtdet::tests {

// The bytes of a PNG of one colour, 8 bits of grey.
inline std::string png(std::uint32_t width, std::uint32_t height, std::uint8_t grey) {
    const auto big = [](std::uint32_t number) {
        return std::string{
            static_cast<char>(number >> 24U), static_cast<char>(number >> 16U), static_cast<char>(number >> 8U),
            static_cast<char>(number)};
    };
    const auto crc = [](const std::string& bytes) {
        std::uint32_t sum = 0xffffffffU;
        for (const char byte : bytes) {
            sum ^= static_cast<std::uint8_t>(byte);
            for (int bit = 0; bit < 8; ++bit) {
                sum = (sum >> 1U) ^ ((sum & 1U) != 0 ? 0xedb88320U : 0U);
            }
        }
        return ~sum;
    };
    const auto chunk = [&](const std::string& type, const std::string& data) {
        return big(static_cast<std::uint32_t>(data.size())) + type + data + big(crc(type + data));
    };
    const std::string row = std::string(1, '\0') + std::string(width, static_cast<char>(grey));
    std::string raw;
    for (std::uint32_t y = 0; y < height; ++y) {
        raw += row;
    }
    std::uint32_t a = 1;
    std::uint32_t b = 0;
    for (const char byte : raw) {
        a = (a + static_cast<std::uint8_t>(byte)) % 65521;
        b = (b + a) % 65521;
    }
    const auto size = static_cast<std::uint16_t>(raw.size());
    const auto inverse = static_cast<std::uint16_t>(~size);
    const std::string stored = std::string("\x78\x01\x01", 3) + static_cast<char>(size & 255) +
                               static_cast<char>(size >> 8) + static_cast<char>(inverse & 255) +
                               static_cast<char>(inverse >> 8) + raw + big((b << 16U) | a);
    return "\x89PNG\r\n\x1a\n" + chunk("IHDR", big(width) + big(height) + std::string("\x08\x00\x00\x00\x00", 5)) +
           chunk("IDAT", stored) + chunk("IEND", "");
}

// Bits as they stand between a JPEG file's markers: a byte of ones has a zero behind it, and ones fill up the last
// byte.
class JpegBits {
public:
    void put(unsigned int value, int count) {
        for (int bit = count - 1; bit >= 0; --bit) {
            byte_ = byte_ << 1U | (value >> static_cast<unsigned int>(bit) & 1U);
            if (++filled_ == 8) {
                bytes_ += static_cast<char>(byte_);
                bytes_ += byte_ == 255 ? std::string(1, '\0') : std::string();
                byte_ = 0;
                filled_ = 0;
            }
        }
    }

    std::string finish() {
        while (filled_ != 0) {
            put(1, 1);
        }
        return bytes_;
    }

private:
    std::string bytes_;
    unsigned int byte_ = 0;
    int filled_ = 0;
};

// A progressive JPEG file, grey all over, that goes over its pixels so often. Each scan but the first says of 32767
// blocks at a time that they hold nothing.
inline std::string progressive_jpeg(std::uint32_t width, std::uint32_t height, int scans) {
    const auto byte = [](unsigned int value) { return std::string(1, static_cast<char>(value)); };
    const auto segment = [&](unsigned int marker, const std::string& data) {
        const auto size = static_cast<unsigned int>(data.size() + 2);
        return "\xff" + byte(marker) + byte(size >> 8U) + byte(size & 255U) + data;
    };
    const std::size_t blocks = std::size_t{(width + 7) / 8} * ((height + 7) / 8);
    const std::string direct_codes = byte(0x00) + byte(1) + std::string(15, '\0') + byte(0);
    std::string run_codes = byte(0x10) + std::string(3, '\0') + byte(15) + std::string(12, '\0');
    for (unsigned int size = 0; size < 15; ++size) {
        run_codes += byte(size << 4U);
    }
    JpegBits runs;
    for (std::size_t left = blocks; left > 0;) {
        const auto run = static_cast<unsigned int>(std::min<std::size_t>(left, 32767));
        int size = 0;
        while (run >> static_cast<unsigned int>(size + 1) != 0) {
            ++size;
        }
        runs.put(static_cast<unsigned int>(size), 4);
        runs.put(run & ((1U << static_cast<unsigned int>(size)) - 1), size);
        left -= run;
    }
    JpegBits zeros;
    for (std::size_t block = 0; block < blocks; ++block) {
        zeros.put(0, 1);
    }
    const std::string runs_text = runs.finish();
    std::string file = "\xff\xd8" + segment(0xdb, byte(0) + std::string(64, '\1')) +
                       segment(
                           0xc2, byte(8) + byte(height >> 8U) + byte(height & 255U) + byte(width >> 8U) +
                                     byte(width & 255U) + byte(1) + byte(1) + byte(0x11) + byte(0)) +
                       segment(0xc4, direct_codes) + segment(0xc4, run_codes) +
                       segment(0xda, byte(1) + byte(1) + std::string(4, '\0')) + zeros.finish();
    for (int scan = 1; scan < scans; ++scan) {
        file += segment(0xda, byte(1) + byte(1) + byte(0) + byte(1) + byte(63) + byte(0)) + runs_text;
    }
    return file + "\xff\xd9";
}

}  // namespace trtdet::tests
