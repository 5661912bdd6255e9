// Who is connected to which port, and who is asked to leave when another one comes.
#pragma once

#include <boost/intrusive/list.hpp>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "metrics.hpp"

namespace trtdet::serve {

struct Port;

// A connection, as those see it who do not speak its protocol. Any thread may call any member at any time.
class Connection : public std::enable_shared_from_this<Connection>,
                   public boost::intrusive::list_base_hook<boost::intrusive::link_mode<boost::intrusive::auto_unlink>> {
public:
    explicit Connection(Port& port) : port_(port) {}
    virtual ~Connection() = default;

    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    Port& port() const { return port_; }

    // Waits for requests.
    virtual void start() = 0;

    // Says that there are too many connections, and ends.
    virtual void start_refusing() = 0;

    // Ends when the request that has begun, if any, is answered.
    virtual void drain() = 0;

    // Makes room for another connection. Where a request has begun meanwhile, or waits to be read, the next one does.
    virtual void leave_if_idle() = 0;

    // Ends at once.
    virtual void cut() = 0;

private:
    Port& port_;
};

// Who is connected to a port.
struct Port {
    const std::uint16_t number;
    const std::size_t most;  // connections
    const bool for_probes;   // GET and HEAD alone
    std::size_t connected = 0;
    // Those that are between two requests, or before the first, in the order in which they will be asked to leave.
    boost::intrusive::list<Connection, boost::intrusive::constant_time_size<false>> idle{};
};

// The connections of all ports. Any thread may call any member at any time.
class Connections {
public:
    // The metrics must live longer than this.
    explicit Connections(Metrics& metrics) : metrics_(metrics) {}

    // As long as an object of this class is there, its connection counts.
    class Presence {
    public:
        Presence(Connections& connections, Connection& connection);
        ~Presence();

        Presence(const Presence&) = delete;
        Presence& operator=(const Presence&) = delete;

    private:
        Connections& connections_;
        Connection& connection_;
    };

    // How many there are at the port of a connection that was made just now, itself among them.
    std::size_t add(const std::shared_ptr<Connection>& connection);

    // Whether the connection waits for a request, so that it can be asked to leave.
    void set_idle(Connection& connection, bool idle);

    // Asks whoever has been idle for longest to leave; returns whether there is anybody.
    bool make_room(Port& port);

    std::vector<std::shared_ptr<Connection>> all();

    // Nobody comes any more.
    void close();

    // Returns whether close() was called and all are gone; waits for that so long.
    bool wait_until_gone(std::chrono::milliseconds patience);

private:
    std::shared_ptr<Connection> take_oldest_idle(Port& port);

    Metrics& metrics_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::unordered_map<const Connection*, std::weak_ptr<Connection>> all_;
    bool closed_ = false;
};

}  // namespace trtdet::serve
