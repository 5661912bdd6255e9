#include "log.hpp"

#include <limits.h>
#include <poll.h>
#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <nlohmann/json.hpp>

namespace trtdet::serve {
namespace {

spdlog::level::level_enum to_spdlog(Level level) {
    switch (level) {
        case Level::debug:
            return spdlog::level::debug;
        case Level::info:
            return spdlog::level::info;
        case Level::warning:
            return spdlog::level::warn;
        case Level::error:
            return spdlog::level::err;
    }
    return spdlog::level::err;
}

std::string as_json(std::string_view text) {
    return nlohmann::json(text).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
}

bool is_plain(std::string_view text) {
    return !text.empty() && std::all_of(text.begin(), text.end(), [](char letter) {
        return letter > ' ' && letter < 127 && letter != '"' && letter != '\\' && letter != '=';
    });
}

// Standard error, which nobody may be reading: a full pipe must not hold up those who log. What finds no room within a
// moment is dropped, and how much that was is logged as soon as there is room again.
class StderrSink final : public spdlog::sinks::base_sink<std::mutex> {
public:
    explicit StderrSink(bool json) : json_(json) {}

private:
    void sink_it_(const spdlog::details::log_msg& message) override {
        if (dropped_ > 0 && has_room(0)) {
            const auto count = std::to_string(dropped_);
            const std::string text =
                json_ ? R"("message":"lines of the log were dropped, as nobody read them","count":)" + count
                      : "lines of the log were dropped, as nobody read them count=" + count;
            if (put({message.logger_name, spdlog::level::warn, text})) {
                dropped_ = 0;
            }
        }
        if (dropped_ > 0 || !put(message)) {
            ++dropped_;
        }
    }

    void flush_() override {}

    static bool has_room(int milliseconds) {
        pollfd target{STDERR_FILENO, POLLOUT, 0};
        // What is closed has room as well: write() says what is the matter, and does not wait.
        return ::poll(&target, 1, milliseconds) != 0;
    }

    // Returns whether the line was written, or nothing ever can be.
    bool put(const spdlog::details::log_msg& message) {
        constexpr std::size_t piece = PIPE_BUF;  // a pipe with room takes so many bytes without waiting
        constexpr int patience_ms = 100;
        spdlog::memory_buf_t text;
        if (torn_) {
            text.push_back('\n');
        }
        formatter_->format(message, text);
        for (std::size_t at = 0; at < text.size();) {
            const auto count = std::min(piece, text.size() - at);
            torn_ = torn_ || at > 0;
            if (!has_room(patience_ms)) {
                return false;
            }
            // Of a socket poll() does not say how much it takes.
            auto written = ::send(STDERR_FILENO, text.data() + at, count, MSG_DONTWAIT | MSG_NOSIGNAL);
            if (written < 0 && errno == ENOTSOCK) {
                written = ::write(STDERR_FILENO, text.data() + at, count);
            }
            if (written < 0 && errno == EAGAIN) {
                return false;
            }
            if (written < 0 && errno != EINTR) {
                return true;
            }
            at += written < 0 ? 0 : static_cast<std::size_t>(written);
        }
        torn_ = false;
        return true;
    }

    const bool json_;
    std::size_t dropped_ = 0;
    bool torn_ = false;  // only a part of the last line was written
};

}  // namespace

std::string quote(std::string_view text) {
    constexpr std::size_t most = 200;
    return text.size() <= most ? as_json(text) : as_json(std::string(text.substr(0, most)) + "...");
}

class Log::Impl {
public:
    Impl(Level least, bool as_objects)
        : logger("trtdet-serve", std::make_shared<StderrSink>(as_objects)), json(as_objects) {
        logger.set_level(to_spdlog(least));
        // spdlog's own handler prints, and would wait where nobody reads.
        logger.set_error_handler([](const std::string&) {});
        if (json) {
            logger.set_pattern(R"({"time":"%Y-%m-%dT%H:%M:%S.%e%z","level":"%l",%v})");
        } else {
            logger.set_pattern("%Y-%m-%d %H:%M:%S.%e %l %v");
        }
    }

    spdlog::logger logger;
    bool json;
};

Log::Log(Level least, bool json) : impl_(std::make_unique<Impl>(least, json)) {}

Log::~Log() = default;

bool Log::shows(Level level) const {
    return impl_->logger.should_log(to_spdlog(level));
}

void Log::write(Level level, std::string_view message, std::initializer_list<Field> fields) noexcept try {
    if (!shows(level)) {
        return;
    }
    std::string line;
    if (impl_->json) {
        line = "\"message\":" + as_json(message);
        for (const auto& field : fields) {
            line += "," + as_json(field.name) + ":" + (field.is_number ? field.value : as_json(field.value));
        }
    } else {
        line = message;
        // Such as TensorRT's, which may have several lines.
        std::replace_if(line.begin(), line.end(), [](char letter) { return letter >= 0 && letter < ' '; }, ' ');
        for (const auto& [name, value, is_number] : fields) {
            line += " " + std::string(name) + "=" + (is_number || is_plain(value) ? value : as_json(value));
        }
    }
    // As an argument, not as the format: the line may hold braces.
    impl_->logger.log(to_spdlog(level), "{}", line);
} catch (...) {
    // No memory for a line. It is often written because there is none, and must not be the end of all else.
}

void Log::write(Level level, std::string_view message, const char* reason) noexcept try {
    write(level, message, {{"reason", reason}});
} catch (...) {
    // As above.
}

}  // namespace trtdet::serve
