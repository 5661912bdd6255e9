// Takes connections for gRPC, which has no limit of its own for them.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "clients.hpp"
#include "grpc_traffic.hpp"

namespace trtdet::serve {

struct ListenerOptions {
    std::string host;        // an address, or a name that has one
    std::uint16_t port = 0;  // 0 for any that is free
    std::size_t most = 1;    // connections
    std::size_t most_of_client = 1;
};

class GrpcListener {
public:
    // Takes the address. take: gets each socket that is accepted, and closes it at its end.
    //
    // Throws Error: the address is unknown, taken or not allowed.
    GrpcListener(ListenerOptions options, Clients& clients, std::function<void(int socket)> take);
    ~GrpcListener();

    GrpcListener(const GrpcListener&) = delete;
    GrpcListener& operator=(const GrpcListener&) = delete;

    // "127.0.0.1:8001", with the port that was chosen.
    std::string address() const;

    // Bytes that the connections of a client may have sent beside their calls, and those of all clients.
    static constexpr std::uint64_t most_beside_of_client = 4 << 20;
    static constexpr std::uint64_t most_beside = 16 << 20;

    // Accepts until stop(). One connection more than a client may have is closed, and those of a client that is refused
    // again and again; one more than all may have takes the place of the oldest of the client with most. Connections
    // that send too much beside their calls are ended.
    void start();

    // Accepts no more; what is connected stays.
    void stop();

    // Ends the connection from there, with all that was received of it and not read. Any thread may call it.
    void cut(const boost::asio::ip::tcp::endpoint& peer);

    // Of the connection from there. Any thread may call it.
    std::shared_ptr<Traffic> traffic(const boost::asio::ip::tcp::endpoint& peer);

private:
    // A connection that was handed over. Its number may belong to another file by now, which is none of these.
    struct Open {
        int socket;
        dev_t device;
        ino_t file;
        boost::asio::ip::tcp::endpoint peer;
        std::shared_ptr<Client> client;
        std::shared_ptr<Traffic> traffic;

        bool closed() const;
        void cut() const;
    };

    void check(const boost::system::error_code& error) const;
    void accept();
    bool admit(const std::shared_ptr<Client>& client);
    void watch();
    void cut_floods();
    void forget_closed();
    void forget(std::list<Open>::iterator one);

    const ListenerOptions options_;
    Clients& clients_;
    const std::function<void(int)> take_;
    boost::asio::io_context context_;
    boost::asio::ip::tcp::acceptor acceptor_{context_};
    std::atomic<bool> stopped_{false};
    std::atomic<bool> watched_{true};  // until nothing is handed over any more
    std::mutex mutex_;
    std::list<Open> open_;  // the oldest first; under the mutex, as what follows
    std::unordered_map<const Client*, std::size_t> by_client_;
    std::map<boost::asio::ip::tcp::endpoint, std::shared_ptr<Traffic>> traffic_;
    bool known_ = false;                              // whether there was a call of a connection that is known
    bool unknown_ = false;                            // and of one that is not
    std::chrono::steady_clock::time_point looked_{};  // when those that are closed were forgotten
    std::thread thread_;
    std::thread watching_;
};

}  // namespace trtdet::serve
