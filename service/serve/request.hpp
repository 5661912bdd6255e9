// Requests and answers, as handlers see them: nothing here knows of sockets.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace trtdet::serve {

using Clock = std::chrono::steady_clock;

struct Client;

// What is known of a request before its body is read.
struct Head {
    std::string method;
    std::string target;                   // as sent
    std::string content_type;             // empty where there is none
    std::string content_encoding;         // empty where there is none
    std::optional<std::uint64_t> length;  // the Content-Length
    bool chunked = false;
    std::string inference_header_length{};  // Inference-Header-Content-Length; empty where there is none
    std::string peer{};                     // address and port of the client, or of the proxy before it
    std::string request_id{};               // the client's, or one of our own
    std::string traceparent{};              // of W3C Trace Context; empty where there is none
    bool expects_continue = false;          // Expect: 100-continue
    std::shared_ptr<Client> client{};       // who shares its limits; empty only where there is no connection
    bool admin = false;                     // it came to the admin port
};

struct Request {
    Head head;
    std::string body;
    Clock::time_point arrived{};                         // its last byte
    std::shared_ptr<const std::atomic<bool>> abandoned;  // set when nobody waits for the answer any more; may be empty
    std::shared_ptr<void> held;                          // let go of together with the body
};

struct Response {
    int status = 200;
    std::string content_type = "application/json";
    std::string body;
    std::vector<std::pair<std::string, std::string>> headers{};  // beside those that every answer has
    std::string error{};                                         // the type of an error, one of a few fixed words
    std::string message{};                                       // of an error
    std::shared_ptr<void> held{};                                // let go of together with the body
};

// Makes the answer, in whatever thread wants it; it is called at most once.
using Answer = std::function<Response()>;

// Takes a request's answer; called once, soon or from another thread. It neither waits nor throws.
using Done = std::function<void(Answer)>;

// 200 with this as the body.
Response json_response(const nlohmann::ordered_json& json);

// As it stands in a body, without a line break; bytes that are not UTF-8 are replaced.
std::string json_text(const nlohmann::ordered_json& json);

// A float32 with as many digits as bring it back.
std::string shortest(float number);

// {"error": {"type": ..., "message": ...}}; bytes of the message that are not UTF-8 are replaced.
Response error_response(int status, std::string_view type, std::string_view message);

// 503 with Retry-After: the same request will be answered later, here or by another instance.
Response busy_response(std::string_view type, std::string_view message);

// 429 with Retry-After: the client has as much as one client may have.
Response client_response(std::string_view message);

class BadQuery : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// The words of a query; '+' is a space and %XX a byte.
//
// Throws BadQuery: a percent sign without two hexadecimal digits, or a key that comes twice.
std::vector<std::pair<std::string, std::string>> parse_query(std::string_view query);

// A part of a path with %XX as a byte. Throws BadQuery: as parse_query().
std::string path_decoded(std::string_view text);

// The X-Request-Id that was given, or a random one where it is missing, longer than 128 bytes, or has other characters
// than letters, digits and -._~:+/=
std::string request_id(std::string_view given);

// The header `traceparent` where it is as W3C Trace Context wants it, else nothing.
std::string valid_traceparent(std::string_view given);

// A request's target in its parts, within the text that was split.
struct Target {
    std::string_view path;
    std::string_view query;
};

// Also takes the absolute form, http://host/path, which a server must.
Target split_target(std::string_view target);

}  // namespace trtdet::serve
