#include "text.hpp"

#include <charconv>

namespace trtdet {

std::string printable(std::string_view text) {
    constexpr std::size_t longest = 200;
    constexpr const char* digits = "0123456789abcdef";
    std::string found;
    for (const char letter : text.substr(0, longest)) {
        const auto byte = static_cast<unsigned char>(letter);
        if (byte >= 0x20 && byte < 0x7f) {
            found += letter;
        } else {
            found.append("\\x").append(1, digits[byte >> 4]).append(1, digits[byte & 15]);
        }
    }
    return text.size() > longest ? found + "..." : found;
}

std::string in_quotes(std::string_view text) {
    return "'" + printable(text) + "'";
}

std::string one_line(const std::string& text) {
    std::string line;
    bool gap = false;
    for (const char one : text) {
        if (static_cast<unsigned char>(one) <= ' ' || one == '\x7f') {
            gap = !line.empty();
            continue;
        }
        if (gap) {
            line += ' ';
        }
        gap = false;
        line += one;
    }
    constexpr std::size_t limit = 300;
    return line.size() <= limit ? line : line.substr(0, limit - 3) + "...";
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
    std::string text;
    for (const std::int64_t size : shape) {
        text += text.empty() && size < 0 ? "B" : (text.empty() ? "" : "x") + std::to_string(size);
    }
    return text;
}

std::string format_number(double value) {
    char digits[32];
    return std::string(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}

}  // namespace trtdet
