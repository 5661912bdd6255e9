// The Open Inference Protocol over gRPC, beside HTTP: the same models, limits and queue.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "log.hpp"
#include "service.hpp"

namespace trtdet::serve {

struct GrpcOptions {
    std::string host = "127.0.0.1";  // an address, or a name that has one
    std::uint16_t port = 0;          // 0 for any that is free
    int max_connections = 1024;      // beside those over HTTP

    std::chrono::milliseconds header_timeout{10'000};  // until a connection speaks HTTP/2
    std::chrono::milliseconds body_timeout{30'000};    // from a call's head to the end of its message
    std::chrono::milliseconds idle_timeout{60'000};    // of a connection, between two calls
    std::chrono::milliseconds write_timeout{30'000};   // of an answer
    std::chrono::milliseconds stop_timeout{30'000};    // for what is still going on when the service stops
};

// Any thread may call any member at any time, but for the destructor.
class GrpcServer {
public:
    // Takes the address; calls are told that the service starts. Service and log must live longer than this.
    //
    // Throws Error: the address is unknown, taken or not allowed; or this program was built without gRPC.
    GrpcServer(const GrpcOptions& options, Service& service, Log& log);
    ~GrpcServer();

    GrpcServer(const GrpcServer&) = delete;
    GrpcServer& operator=(const GrpcServer&) = delete;

    // Serves from now on.
    void serve();

    // What it listens on, with the port that was chosen: "127.0.0.1:8001".
    std::string address() const;

    // Takes no more calls and finishes those that have begun; called once, or by the destructor.
    //
    // Returns whether all of them were finished within the stop timeout. Else it must not be destroyed: gRPC waits for
    // them, however long an engine hangs.
    bool stop();

private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace trtdet::serve
