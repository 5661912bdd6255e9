#include "request.hpp"

#include <algorithm>
#include <boost/url/pct_string_view.hpp>
#include <cctype>
#include <charconv>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <random>

#include "log.hpp"

namespace trtdet::serve {
namespace {

using Json = nlohmann::ordered_json;

constexpr auto npos = std::string_view::npos;

std::string percent_decoded(std::string_view text, bool plus_is_space) {
    const auto valid = boost::urls::make_pct_string_view({text.data(), text.size()});
    if (!valid) {
        throw BadQuery("the target has a '%' without two hexadecimal digits; write %25 for a percent sign");
    }
    boost::urls::encoding_opts options;
    options.space_as_plus = plus_is_space;
    return valid->decode(options);
}

}  // namespace

std::string json_text(const Json& json) {
    return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Response json_response(const Json& json) {
    return {200, "application/json", json_text(json) + "\n", {}, {}};
}

std::string shortest(float number) {
    char text[32];
    const auto end = std::to_chars(std::begin(text), std::end(text), number).ptr;
    return {std::begin(text), end};
}

std::string path_decoded(std::string_view text) {
    return percent_decoded(text, false);
}

std::string request_id(std::string_view given) {
    constexpr std::string_view marks = "-._~:+/=";
    const bool good = std::all_of(given.begin(), given.end(), [&](char letter) {
        return std::isalnum(static_cast<unsigned char>(letter)) != 0 || marks.find(letter) != npos;
    });
    if (!given.empty() && given.size() <= 128 && good) {
        return std::string(given);
    }
    thread_local std::mt19937_64 random = [] {
        std::random_device device;
        std::seed_seq seeds{device(), device(), device(), device()};
        return std::mt19937_64(seeds);
    }();
    char text[17];
    std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(random()));
    return text;
}

std::string valid_traceparent(std::string_view given) {
    constexpr std::string_view form = "00-00000000000000000000000000000000-0000000000000000-00";
    bool good = given.size() == form.size();
    for (std::size_t i = 0; good && i < form.size(); ++i) {
        const char letter = given[i];
        good = form[i] == '-' ? letter == '-' : (letter >= '0' && letter <= '9') || (letter >= 'a' && letter <= 'f');
    }
    return good ? std::string(given) : std::string();
}

Target split_target(std::string_view target) {
    const auto scheme = target.find("://");
    if (scheme != npos && target.front() != '/') {
        const auto slash = target.find('/', scheme + 3);
        target = slash == npos ? std::string_view("/") : target.substr(slash);
    }
    const auto question = target.find('?');
    return {target.substr(0, question), question == npos ? std::string_view() : target.substr(question + 1)};
}

Response error_response(int status, std::string_view type, std::string_view message) {
    const Json json = {{"error", {{"type", type}, {"message", message}}}};
    return {status, "application/json", json_text(json) + "\n", {}, std::string(type), std::string(message)};
}

Response busy_response(std::string_view type, std::string_view message) {
    auto response = error_response(503, type, message);
    response.headers.emplace_back("Retry-After", "1");
    return response;
}

Response client_response(std::string_view message) {
    auto response = error_response(429, "too-many-requests", message);
    response.headers.emplace_back("Retry-After", "1");
    return response;
}

std::vector<std::pair<std::string, std::string>> parse_query(std::string_view query) {
    std::vector<std::pair<std::string, std::string>> words;
    while (!query.empty()) {
        const auto end = query.find('&');
        const auto word = query.substr(0, end);
        query.remove_prefix(end == npos ? query.size() : end + 1);
        if (word.empty()) {
            continue;
        }
        const auto equals = std::min(word.find('='), word.size());
        auto key = percent_decoded(word.substr(0, equals), true);
        for (const auto& other : words) {
            if (other.first == key) {
                throw BadQuery("the query has the key " + quote(key) + " twice");
            }
        }
        words.emplace_back(std::move(key), percent_decoded(equals < word.size() ? word.substr(equals + 1) : "", true));
    }
    return words;
}

}  // namespace trtdet::serve
