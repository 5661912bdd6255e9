// How values stand in messages.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace trtdet {

// A text from outside as it may stand in a message of one line: control characters and bytes that are not ASCII as
// \xNN, cut where it is long.
std::string printable(std::string_view text);

// The same in single quotes.
std::string in_quotes(std::string_view text);

// What a library said, as it fits into a message of one line: white space folded, cut at 300 characters.
std::string one_line(const std::string& text);

// A shape as Bx3x4, B where the first dimension is -1, the batch; another that is open stays -1.
std::string shape_text(const std::vector<std::int64_t>& shape);

// A number with as many digits as it takes to read it back.
std::string format_number(double value);

}  // namespace trtdet
