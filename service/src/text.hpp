// How values stand in messages.
#pragma once

#include <string>
#include <string_view>

namespace trtdet {

// A text from outside as it may stand in a message of one line: control characters and bytes that are not ASCII as
// \xNN, cut where it is long.
std::string printable(std::string_view text);

// The same in single quotes.
std::string in_quotes(std::string_view text);

// A number with as many digits as it takes to read it back.
std::string format_number(double value);

}  // namespace trtdet
