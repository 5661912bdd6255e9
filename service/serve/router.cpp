#include "router.hpp"

#include <algorithm>

#include "encoding.hpp"
#include "log.hpp"

namespace trtdet::serve {
namespace {

constexpr std::string_view reading = "GET, HEAD";

bool allows(const Endpoint& endpoint, std::string_view method) {
    return endpoint.allow == method || (endpoint.allow == reading && (method == "GET" || method == "HEAD"));
}

std::string_view take_part(std::string_view& path) {
    const auto end = std::min(path.find('/'), path.size());
    const auto part = path.substr(0, end);
    path.remove_prefix(std::min(end + 1, path.size()));
    return part;
}

// The words of a path that is as the pattern says.
std::optional<Words> matched(std::string_view pattern, std::string_view path) {
    if (std::count(pattern.begin(), pattern.end(), '/') != std::count(path.begin(), path.end(), '/')) {
        return std::nullopt;
    }
    Words words;
    while (!pattern.empty() || !path.empty()) {
        const auto expected = take_part(pattern);
        const auto part = take_part(path);
        if (expected.empty() || expected.front() != '{') {
            if (expected != part) {
                return std::nullopt;
            }
            continue;
        }
        try {
            words.push_back(path_decoded(part));
        } catch (const BadQuery&) {
            return std::nullopt;
        }
        if (words.back().empty()) {
            return std::nullopt;
        }
    }
    return words;
}

}  // namespace

Endpoint page(std::string path, std::string what, std::function<Response(const Words&)> answer) {
    Endpoint endpoint{std::move(path), std::string(reading), std::move(what), nullptr, nullptr, false, Ports::both};
    endpoint.refuse = [path = endpoint.path](const Head& head, const Words& /*words*/) -> std::optional<Response> {
        if (head.chunked || head.length.value_or(0) > 0) {
            return error_response(413, "body-too-large", path + " takes no body");
        }
        return std::nullopt;
    };
    endpoint.handle = [answer = std::move(answer)](const Request& /*request*/, const Words& words, const Done& done) {
        done([answer, words] { return answer(words); });
    };
    return endpoint;
}

std::optional<Response> refuse_body(const Head& head, std::uint64_t limit) {
    if (!head.length && !head.chunked) {
        return error_response(
            411, "length-required", "the request has neither Content-Length nor Transfer-Encoding: chunked");
    }
    if (head.length.value_or(0) > limit) {
        return error_response(
            413, "body-too-large",
            "the body has " + std::to_string(*head.length) + " bytes, allowed are " + std::to_string(limit));
    }
    if (!head.content_encoding.empty() && head.content_encoding != "identity" && !is_packing(head.content_encoding)) {
        return error_response(
            415, "unsupported-media-type",
            "the Content-Encoding is " + quote(head.content_encoding) +
                "; send the body as it is, or with gzip or deflate");
    }
    return std::nullopt;
}

std::optional<Response> Router::refuse(const Head& head) const {
    const auto path = split_target(head.target).path;
    Words words;
    const auto* endpoint = find(path, &words);
    if (endpoint == nullptr) {
        return error_response(404, "not-found", "there is no " + quote(path) + "; GET / lists what there is");
    }
    if (!allows(*endpoint, head.method)) {
        auto response = error_response(
            405, "method-not-allowed",
            std::string(path) + " does not take " + quote(head.method) + "; allowed is " + endpoint->allow);
        response.headers.emplace_back("Allow", endpoint->allow);
        return response;
    }
    if (endpoint->ports == Ports::admin && !head.admin) {
        return error_response(
            403, "admin-only", std::string(path) + " is on the admin port alone; start the service with --admin-port");
    }
    if (endpoint->ports == Ports::service && head.admin) {
        return error_response(
            403, "not-admin", std::string(path) + " is not on the admin port; send the request to the service's own");
    }
    return endpoint->refuse(head, words);
}

void Router::handle(Request request, Done done) const {
    Words words;
    const auto* endpoint = find(split_target(request.head.target).path, &words);
    endpoint->handle(std::move(request), words, std::move(done));
}

const Endpoint* Router::find(std::string_view path, Words* words) const {
    for (const auto& endpoint : endpoints_) {
        if (auto found = matched(endpoint.path, path)) {
            if (words != nullptr) {
                *words = std::move(*found);
            }
            return &endpoint;
        }
    }
    return nullptr;
}

}  // namespace trtdet::serve
