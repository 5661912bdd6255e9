// One client's connection, and the requests that come over it.
#pragma once

#include <atomic>
#include <boost/asio/ip/tcp.hpp>
#include <memory>
#include <string>
#include <utility>

#include "connections.hpp"
#include "http_message.hpp"
#include "http_server.hpp"
#include "log.hpp"
#include "metrics.hpp"
#include "service.hpp"

namespace trtdet::serve {

// What the connections of a server have in common.
struct Serving {
    Serving(HttpOptions wanted, Service& what, Log& where, Metrics& counts)
        : options(std::move(wanted)), service(what), log(where), metrics(counts), connections(counts) {}

    const HttpOptions options;
    Service& service;
    Log& log;
    Metrics& metrics;
    const std::string without_memory = answer_without_memory();
    std::atomic<bool> draining{false};  // connections end after their answer
    Connections connections;
};

// A connection that was accepted; it is to be started. Its server and port must live longer than it does.
std::shared_ptr<Connection> make_connection(Serving& server, Port& port, boost::asio::ip::tcp::socket socket);

}  // namespace trtdet::serve
