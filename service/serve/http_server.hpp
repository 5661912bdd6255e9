// HTTP/1.1 over TCP: connections, limits and deadlines, and a stop that loses nothing.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "log.hpp"
#include "metrics.hpp"
#include "service.hpp"

namespace trtdet::serve {

struct HttpOptions {
    std::string host = "127.0.0.1";           // an address, or a name that has one
    std::uint16_t port = 8080;                // 0 for any that is free
    std::optional<std::uint16_t> admin_port;  // for probes and operators, with a limit of connections of its own
    int threads = 2;
    int max_connections = 1024;  // one more takes the place of one that is idle or slow, or is told 503 and closed

    // Each is a total, however the bytes trickle in.
    std::chrono::milliseconds header_timeout{10'000};  // from a request's first byte; of a connection, for the first
    std::chrono::milliseconds body_timeout{30'000};    // from the end of the header
    std::chrono::milliseconds idle_timeout{60'000};    // between requests
    std::chrono::milliseconds write_timeout{30'000};   // of an answer
    std::chrono::milliseconds stop_timeout{30'000};    // for what is still going on when the service stops
    std::chrono::milliseconds drain_delay{0};          // between /readyz saying no and the listening socket's end
};

// Any thread may call any member at any time, but for the destructor.
class HttpServer {
public:
    // Takes the address, without listening. The service, log and metrics must live longer than this.
    //
    // Throws Error: the address is unknown, taken or not allowed.
    HttpServer(HttpOptions options, Service& service, Log& log, Metrics& metrics);
    ~HttpServer();

    HttpServer(const HttpServer&) = delete;
    HttpServer& operator=(const HttpServer&) = delete;

    // Starts the threads and lets clients connect; they are served from run() on.
    //
    // Throws Error: another process was faster, or there are no threads to be had.
    void listen();

    // What it listens on, with the port that was chosen: "http://127.0.0.1:8080".
    std::string url() const;

    // The same for the port of HttpOptions::admin_port, which must have been given.
    std::string admin_url() const;

    // Serves from listen() until stop(), then finishes every request that has begun. Called once.
    //
    // Returns whether all of them were finished within the stop timeout; what was not is cut.
    bool run();

    // Makes run() return; does not wait for it.
    void stop();

private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace trtdet::serve
