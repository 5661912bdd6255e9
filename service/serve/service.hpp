// The endpoints, on plain requests and answers: nothing here knows of sockets.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "log.hpp"
#include "metrics.hpp"
#include "trtdet/detector.hpp"
#include "trtdet/image.hpp"

namespace trtdet::serve {

// What is known of a request before its body is read.
struct Head {
    std::string method;
    std::string target;                   // as sent
    std::string content_type;             // empty where there is none
    std::string content_encoding;         // empty where there is none
    std::optional<std::uint64_t> length;  // the Content-Length
    bool chunked = false;
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
};

// {"error": {"type": ..., "message": ...}}; bytes of the message that are not UTF-8 are replaced.
Response error_response(int status, std::string_view type, std::string_view message);

// 503 with Retry-After: the same request will be answered later, here or by another instance.
Response busy_response(std::string_view type, std::string_view message);

class BadQuery : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// The words of a query; '+' is a space and %XX a byte.
//
// Throws BadQuery: a percent sign without two hexadecimal digits, or a key that comes twice.
std::vector<std::pair<std::string, std::string>> parse_query(std::string_view query);

struct ServiceOptions {
    int workers = 0;                      // threads that decode and pre-process; 0 for as many as the machine has cores
    std::uint64_t max_body = 32U << 20U;  // bytes
    ImageLimits limits;
    std::size_t max_images = 32;  // of a request
    int max_requests = 256;       // that are worked on at a time
    std::chrono::milliseconds request_timeout{10'000};
    int unhealthy_after = 20;  // runs that failed one after the other; 0 for never
};

// Any thread may call any member at any time, but for the destructor.
class Service {
public:
    // Makes the answer, in whatever thread wants it; it is called at most once.
    using Answer = std::function<Response()>;

    // current: what detects, never empty; asked once for each request. A request may let go of it last, in one of its
    // own threads: it must then be destroyed by another one. Log and metrics must live longer than this.
    Service(ServiceOptions options, std::function<std::shared_ptr<Detector>()> current, Log& log, Metrics& metrics);

    // Waits for the threads; handle() must not be called any more.
    ~Service();

    Service(const Service&) = delete;
    Service& operator=(const Service&) = delete;

    const ServiceOptions& options() const;

    // What is to be answered without reading the body: a wrong path or method, a body that is too large or of another
    // kind, a query that is wrong, too much to do. Nothing where the body should be read and handle() be called.
    std::optional<Response> refuse(const Head& head) const;

    // Works on a request that refuse() has let pass. `done` is called once, soon or from another thread, and must not
    // wait; nobody may be interested by then.
    void handle(Request request, std::function<void(Answer)> done);

    // Counts and logs an answer, whoever made it. took: from the request's last byte.
    void answered(const Head& head, const Response& response, Clock::duration took) const;

    // From now on /readyz says no; everything else goes on.
    void leave();

private:
    class Impl;
    std::shared_ptr<Impl> impl_;
};

}  // namespace trtdet::serve
