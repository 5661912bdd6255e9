#include "http_message.hpp"

#include <boost/beast/core/string.hpp>
#include <ctime>
#include <string_view>

namespace trtdet::serve {
namespace {

namespace http = boost::beast::http;

std::string_view to_view(boost::core::string_view text) {
    return {text.data(), text.size()};
}

std::string http_date() {
    const auto now = std::time(nullptr);
    std::tm parts{};
    ::gmtime_r(&now, &parts);
    char text[64];
    return {text, std::strftime(text, sizeof text, "%a, %d %b %Y %H:%M:%S GMT", &parts)};
}

}  // namespace

Head head_of(const RequestParser& parser, const std::string& peer, const std::shared_ptr<Client>& client) {
    const auto& message = parser.get();
    Head head;
    head.method = to_view(message.method_string());
    head.target = to_view(message.target());
    head.content_type = to_view(message[http::field::content_type]);
    head.content_encoding = to_view(message[http::field::content_encoding]);
    head.peer = peer;
    head.client = client;
    head.request_id = request_id(to_view(message["X-Request-Id"]));
    head.traceparent = valid_traceparent(to_view(message["traceparent"]));
    head.inference_header_length = to_view(message["Inference-Header-Content-Length"]);
    head.chunked = parser.chunked();
    head.expects_continue = !message[http::field::expect].empty();
    if (const auto length = parser.content_length()) {
        head.length = *length;
    }
    return head;
}

std::optional<Response> check_header(const RequestParser& parser) {
    const auto& message = parser.get();
    if (message.version() == 11 && message.count(http::field::host) != 1) {
        return error_response(400, "malformed-http", "the request has no Host, or several");
    }
    if (message.version() != 11 && message.version() != 10) {
        return error_response(505, "http-version", "the version is not HTTP/1.0 or HTTP/1.1");
    }
    if (message.count(http::field::transfer_encoding) > 0 &&
        !boost::beast::iequals(message[http::field::transfer_encoding], "chunked")) {
        return error_response(
            501, "transfer-encoding", "the Transfer-Encoding is not chunked, the only one that is taken");
    }
    const auto expect = message[http::field::expect];
    if (!expect.empty() && !boost::beast::iequals(expect, "100-continue")) {
        return error_response(417, "expectation-failed", "the request expects something else than 100-continue");
    }
    return std::nullopt;
}

bool has_body(const Head& head) {
    return head.chunked || head.length.value_or(0) > 0;
}

std::string header_text(const Response& response, bool keep_alive) {
    std::string text = "HTTP/1.1 " + std::to_string(response.status) + " " +
                       std::string(to_view(http::obsolete_reason(static_cast<http::status>(response.status)))) + "\r\n";
    text += "Date: " + http_date() + "\r\nServer: trtdet-serve\r\n";
    text += "Content-Type: " + response.content_type + "\r\n";
    text += "Content-Length: " + std::to_string(response.body.size()) + "\r\n";
    for (const auto& [name, value] : response.headers) {
        text += name + ": " + value + "\r\n";
    }
    return text + (keep_alive ? "Connection: keep-alive\r\n\r\n" : "Connection: close\r\n\r\n");
}

std::string answer_without_memory() {
    const std::string body =
        R"({"error":{"type":"overloaded","message":"there is no memory for the request; try again later"}})"
        "\n";
    return "HTTP/1.1 503 Service Unavailable\r\nServer: trtdet-serve\r\nContent-Type: "
           "application/json\r\nContent-Length: " +
           std::to_string(body.size()) + "\r\nRetry-After: 1\r\nConnection: close\r\n\r\n" + body;
}

}  // namespace trtdet::serve
