#include "router.hpp"

#include <algorithm>

#include "log.hpp"

namespace trtdet::serve {
namespace {

constexpr std::string_view reading = "GET, HEAD";

bool allows(const Endpoint& endpoint, std::string_view method) {
    return endpoint.allow == method || (endpoint.allow == reading && (method == "GET" || method == "HEAD"));
}

}  // namespace

Endpoint page(std::string path, std::string what, std::function<Response()> answer) {
    Endpoint endpoint{std::move(path), std::string(reading), std::move(what), nullptr, nullptr};
    endpoint.refuse = [path = endpoint.path](const Head& head) -> std::optional<Response> {
        if (head.chunked || head.length.value_or(0) > 0) {
            return error_response(413, "body-too-large", path + " takes no body");
        }
        return std::nullopt;
    };
    endpoint.handle = [answer = std::move(answer)](const Request& /*request*/, const Done& done) { done(answer); };
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
    if (!head.content_encoding.empty() && head.content_encoding != "identity") {
        return error_response(
            415, "unsupported-media-type",
            "the Content-Encoding is " + quote(head.content_encoding) + "; send the image as it is, without one");
    }
    return std::nullopt;
}

std::optional<Response> Router::refuse(const Head& head) const {
    const auto path = split_target(head.target).path;
    const auto* endpoint = find(path);
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
    return endpoint->refuse(head);
}

void Router::handle(Request request, Done done) const {
    const auto* endpoint = find(split_target(request.head.target).path);
    endpoint->handle(std::move(request), std::move(done));
}

const Endpoint* Router::find(std::string_view path) const {
    const auto found = std::find_if(
        endpoints_.begin(), endpoints_.end(), [&](const Endpoint& endpoint) { return endpoint.path == path; });
    return found == endpoints_.end() ? nullptr : &*found;
}

}  // namespace trtdet::serve
