#include "grpc_traffic.hpp"

// Not netinet/tcp.h, whose tcp_info ends before the bytes.
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstddef>

namespace trtdet::serve {
namespace {

// Bytes of a socket that were read, as Linux counts them; 0 where it does not.
std::uint64_t bytes_read_of(int socket) {
    tcp_info info{};
    socklen_t size = sizeof(info);
    int waiting = 0;
    if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 ||
        size < offsetof(tcp_info, tcpi_bytes_received) + sizeof(info.tcpi_bytes_received) ||
        ::ioctl(socket, FIONREAD, &waiting) != 0) {
        return 0;
    }
    const auto unread = static_cast<std::uint64_t>(std::max(waiting, 0));
    return info.tcpi_bytes_received > unread ? info.tcpi_bytes_received - unread : 0;
}

}  // namespace

void Traffic::begin() {
    const std::lock_guard lock(mutex_);
    allowed_ += of_call;
}

void Traffic::ask(std::uint64_t most) {
    const std::lock_guard lock(mutex_);
    asked_ += most;
}

void Traffic::arrived(std::uint64_t most, std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    asked_ -= most;
    // Frames have heads too.
    allowed_ += bytes + bytes / 8;
}

void Traffic::gone(std::uint64_t most) {
    const std::lock_guard lock(mutex_);
    asked_ -= most;
    allowed_ += std::min(most, more_than_allowed());
}

std::uint64_t Traffic::beside() {
    const std::lock_guard lock(mutex_);
    return more_than_allowed();
}

std::uint64_t Traffic::more_than_allowed() const {
    const auto read = bytes_read_of(socket_);
    const auto most = allowed_ + asked_;
    return read > most ? read - most : 0;
}

}  // namespace trtdet::serve
