#include "connections.hpp"

#include <string>
#include <utility>

namespace trtdet::serve {

Connections::Presence::Presence(Connections& connections, Connection& connection)
    : connections_(connections), connection_(connection) {
    const std::lock_guard lock(connections_.mutex_);
    ++connection_.port().connected;
    if (!connection_.port().for_probes) {
        ++connection_.client()->connections;
    }
    connections_.metrics_.connections(+1);
}

Connections::Presence::~Presence() {
    connections_.metrics_.connections(-1);
    const std::lock_guard lock(connections_.mutex_);
    connection_.unlink();
    --connection_.port().connected;
    if (!connection_.port().for_probes) {
        --connection_.client()->connections;
    }
    connections_.all_.erase(&connection_);
    connections_.changed_.notify_all();
}

Connections::Added Connections::add(const std::shared_ptr<Connection>& connection) {
    Port& port = connection->port();
    std::size_t count = 0;
    {
        const std::lock_guard lock(mutex_);
        all_[connection.get()] = connection;
        count = port.connected;
    }
    return {refusal(*connection, count), count};
}

std::optional<Response> Connections::refusal(const Connection& connection, std::size_t connected) {
    Port& port = connection.port();
    // Who has more than its part makes room itself.
    const auto& client = connection.client();
    if (!port.for_probes && port.most_of_client < port.most && client->connections > port.most_of_client) {
        if (make_room(port, client.get())) {
            return std::nullopt;
        }
        return client_response(
            "you have the " + std::to_string(port.most_of_client) +
            " connections that one client may have (--max-connections, --max-client-percent); try again later");
    }
    if (connected > port.most && !make_room(port)) {
        return busy_response("overloaded", "there are too many connections (--max-connections); try again later");
    }
    return std::nullopt;
}

void Connections::set_waiting(Connection& connection, Waits waits) {
    const std::lock_guard lock(mutex_);
    connection.unlink();
    if (waits == Waits::for_request) {
        connection.port().idle.push_back(connection);
    } else if (waits == Waits::for_end) {
        connection.port().idle.push_front(connection);
    } else if (waits == Waits::for_rest) {
        connection.port().unfinished.push_back(connection);
    }
}

// Nothing where all of them have requests that are worked on.
std::shared_ptr<Connection> Connections::take_leaving(Port& port, const Client* client) {
    const auto take = [client](Port::List& list) -> std::shared_ptr<Connection> {
        for (auto one = list.begin(); one != list.end();) {
            Connection& connection = *one++;
            if (client == nullptr || connection.client().get() == client) {
                connection.unlink();
                if (auto held = connection.weak_from_this().lock()) {
                    return held;
                }
            }
        }
        return nullptr;
    };
    const std::lock_guard lock(mutex_);
    if (auto idle = take(port.idle)) {
        return idle;
    }
    if (client == nullptr) {
        std::size_t most = 0;
        for (const auto& connection : port.unfinished) {
            if (connection.client()->connections > most) {
                most = connection.client()->connections;
                client = connection.client().get();
            }
        }
    }
    return take(port.unfinished);
}

bool Connections::make_room(Port& port, const Client* client) {
    const auto leaving = take_leaving(port, client);
    if (leaving) {
        leaving->leave(client != nullptr);
    }
    return leaving != nullptr;
}

bool Connections::drop_slowest(Connection& asks, std::uint64_t client) {
    std::shared_ptr<Connection> slowest;
    {
        const std::lock_guard lock(mutex_);
        for (auto& connection : asks.port().unfinished) {
            if (&connection != &asks && connection.client()->number == client &&
                (slowest = connection.weak_from_this().lock())) {
                connection.unlink();
                break;
            }
        }
    }
    if (slowest) {
        slowest->leave(true);
    }
    return slowest != nullptr;
}

std::vector<std::shared_ptr<Connection>> Connections::all() {
    std::vector<std::shared_ptr<Connection>> found;
    const std::lock_guard lock(mutex_);
    for (const auto& [key, connection] : all_) {
        if (auto held = connection.lock()) {
            found.push_back(std::move(held));
        }
    }
    return found;
}

void Connections::close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
}

bool Connections::wait_until_gone(std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, patience, [this] { return closed_ && all_.empty(); });
}

}  // namespace trtdet::serve
