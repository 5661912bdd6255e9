// What a connection over gRPC sends beside its calls.
#pragma once

#include <cstdint>
#include <mutex>

namespace trtdet::serve {

// A connection's bytes that belong to no call: frames that nobody asked for, and heads that do not end, of which gRPC
// keeps what it reads. A call may have a head and a window of its message, and its message once that is asked for. Any
// thread may call any member at any time.
class Traffic {
public:
    // socket: when it is closed, what is told of it has no meaning any more.
    explicit Traffic(int socket) : socket_(socket) {}

    Traffic(const Traffic&) = delete;
    Traffic& operator=(const Traffic&) = delete;

    // A call begins.
    void begin();

    // Its message is asked for, which has so many bytes at most.
    void ask(std::uint64_t most);

    // The message that was asked for is there.
    void arrived(std::uint64_t most, std::uint64_t bytes);

    // It will not come.
    void gone(std::uint64_t most);

    // The bytes of no call until now.
    std::uint64_t beside();

private:
    std::uint64_t more_than_allowed() const;

    static constexpr std::uint64_t of_call = 80 * 1024;

    std::mutex mutex_;
    const int socket_;
    std::uint64_t allowed_ = 64 * 1024;
    std::uint64_t asked_ = 0;
};

}  // namespace trtdet::serve
