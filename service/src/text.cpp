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

std::string format_number(double value) {
    char digits[32];
    return std::string(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}

}  // namespace trtdet
