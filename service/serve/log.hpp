// The program's log: one line an event on standard error, as text or as JSON.
#pragma once

#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace trtdet::serve {

enum class Level { debug, info, warning, error };

// Names what went with an event, as in {"bundle", folder} and {"status", 200}.
struct Field {
    Field(std::string_view its_name, std::string text) : name(its_name), value(std::move(text)) {}

    template <typename Number, typename = std::enable_if_t<std::is_arithmetic_v<Number>>>
    Field(std::string_view its_name, Number number) : name(its_name), value(std::to_string(number)), is_number(true) {}

    std::string_view name;
    std::string value;
    bool is_number = false;
};

// A text with control characters, quotes and bytes that are not UTF-8 escaped, in double quotes: what a client sent can
// then neither end a line of the log nor forge one. At most 200 bytes of it are kept.
std::string quote(std::string_view text);

// Any thread may write; lines never mix. Where nobody reads standard error, or there is no memory for a line, it is
// dropped: a log holds up nothing.
class Log {
public:
    // Where JSON is asked for, each line is an object with time, level, message and the fields.
    Log(Level least, bool json);
    ~Log();

    Log(const Log&) = delete;
    Log& operator=(const Log&) = delete;

    bool shows(Level level) const;
    void write(Level level, std::string_view message, std::initializer_list<Field> fields = {}) noexcept;

    // The same with a field `reason`, for those who report that there is no memory.
    void write(Level level, std::string_view message, const char* reason) noexcept;

private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace trtdet::serve
