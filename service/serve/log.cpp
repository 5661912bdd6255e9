#include "log.hpp"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
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

}  // namespace

std::string quote(std::string_view text) {
    constexpr std::size_t most = 200;
    return text.size() <= most ? as_json(text) : as_json(std::string(text.substr(0, most)) + "...");
}

class Log::Impl {
public:
    Impl(Level least, bool as_objects)
        : logger("trtdet-serve", std::make_shared<spdlog::sinks::stderr_sink_mt>()), json(as_objects) {
        logger.set_level(to_spdlog(least));
        logger.flush_on(spdlog::level::debug);
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

void Log::write(Level level, std::string_view message, std::initializer_list<Field> fields) {
    if (!shows(level)) {
        return;
    }
    std::string line;
    if (impl_->json) {
        line = "\"message\":" + as_json(message);
        for (const auto& [name, value] : fields) {
            line += "," + as_json(name) + ":" + as_json(value);
        }
    } else {
        line = message;
        // Such as TensorRT's, which may have several lines.
        std::replace_if(line.begin(), line.end(), [](char letter) { return letter >= 0 && letter < ' '; }, ' ');
        for (const auto& [name, value] : fields) {
            line += " " + std::string(name) + "=" + (is_plain(value) ? value : as_json(value));
        }
    }
    // As an argument, not as the format: the line may hold braces.
    impl_->logger.log(to_spdlog(level), "{}", line);
}

}  // namespace trtdet::serve
