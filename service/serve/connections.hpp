// Who is connected to which port, and who is asked to leave when another one comes.
#pragma once

#include <boost/intrusive/list.hpp>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "clients.hpp"
#include "metrics.hpp"
#include "request.hpp"

namespace trtdet::serve {

struct Port;

// A connection, as those see it who do not speak its protocol. Any thread may call any member at any time.
class Connection : public std::enable_shared_from_this<Connection>,
                   public boost::intrusive::list_base_hook<boost::intrusive::link_mode<boost::intrusive::auto_unlink>> {
public:
    Connection(Port& port, std::shared_ptr<Client> client) : port_(port), client_(std::move(client)) {}
    virtual ~Connection() = default;

    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    Port& port() const { return port_; }
    const std::shared_ptr<Client>& client() const { return client_; }

    // Waits for requests.
    virtual void start() = 0;

    // Answers with this, and ends.
    virtual void start_refusing(Response refusal) = 0;

    // Ends when the request that has begun, if any, is answered.
    virtual void drain() = 0;

    // Makes room for another connection, if no request has arrived meanwhile; else the next one does, of this client
    // alone where the room is to be its.
    virtual void leave(bool of_client) = 0;

    // Ends at once.
    virtual void cut() = 0;

private:
    Port& port_;
    const std::shared_ptr<Client> client_;
};

// Who is connected to a port.
struct Port {
    const std::uint16_t number;
    const std::size_t most;            // connections
    const std::size_t most_of_client;  // of these
    const bool for_probes;             // and for what an operator does: no images
    std::size_t connected = 0;

    // In the order in which they will be asked to leave: those that are answered for the last time, that are between
    // two requests, or before the first; and those whose request has begun to arrive and is not whole.
    using List = boost::intrusive::list<Connection, boost::intrusive::constant_time_size<false>>;
    List idle{};
    List unfinished{};
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

    // What becomes of a connection.
    struct Added {
        std::optional<Response> refusal;  // where there are too many, and none can leave
        std::size_t connected = 0;        // to its port, itself among them
    };

    // Takes a connection that was made just now, and asks another one to leave where there are too many.
    Added add(const std::shared_ptr<Connection>& connection);

    // What the connection waits for, so that it can be asked to leave.
    enum class Waits { not_at_all, for_request, for_rest, for_end };
    void set_waiting(Connection& connection, Waits waits);

    // Asks a connection to leave: the one that has been idle for longest, else that of the oldest unfinished request of
    // the client with most connections. client: whose connections alone are asked; null for all.
    //
    // Returns whether there is any.
    bool make_room(Port& port, const Client* client = nullptr);

    // Asks the connection of a client's oldest unfinished request to leave, but not the one that asks. client: its
    // number.
    //
    // Returns whether there is any.
    bool drop_slowest(Connection& asks, std::uint64_t client);

    std::vector<std::shared_ptr<Connection>> all();

    // Nobody comes any more.
    void close();

    // Returns whether close() was called and all are gone; waits for that so long.
    bool wait_until_gone(std::chrono::milliseconds patience);

private:
    std::optional<Response> refusal(const Connection& connection, std::size_t connected);
    std::shared_ptr<Connection> take_leaving(Port& port, const Client* client);

    Metrics& metrics_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::unordered_map<const Connection*, std::weak_ptr<Connection>> all_;
    bool closed_ = false;
};

}  // namespace trtdet::serve
