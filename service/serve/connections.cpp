#include "connections.hpp"

#include <utility>

namespace trtdet::serve {

Connections::Presence::Presence(Connections& connections, Connection& connection)
    : connections_(connections), connection_(connection) {
    const std::lock_guard lock(connections_.mutex_);
    ++connection_.port().connected;
    connections_.metrics_.connections(+1);
}

Connections::Presence::~Presence() {
    connections_.metrics_.connections(-1);
    const std::lock_guard lock(connections_.mutex_);
    connection_.unlink();
    --connection_.port().connected;
    connections_.all_.erase(&connection_);
    connections_.changed_.notify_all();
}

std::size_t Connections::add(const std::shared_ptr<Connection>& connection) {
    const std::lock_guard lock(mutex_);
    all_[connection.get()] = connection;
    return connection->port().connected;
}

void Connections::set_idle(Connection& connection, bool idle) {
    const std::lock_guard lock(mutex_);
    connection.unlink();
    if (idle) {
        connection.port().idle.push_back(connection);
    }
}

// Nothing where all connections have requests.
std::shared_ptr<Connection> Connections::take_oldest_idle(Port& port) {
    const std::lock_guard lock(mutex_);
    while (!port.idle.empty()) {
        Connection& oldest = port.idle.front();
        oldest.unlink();
        if (auto held = oldest.weak_from_this().lock()) {
            return held;
        }
    }
    return nullptr;
}

bool Connections::make_room(Port& port) {
    const auto idle = take_oldest_idle(port);
    if (idle) {
        idle->leave_if_idle();
    }
    return idle != nullptr;
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
