// Memory that requests share, charged before it is held: to all of them, and to the client.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "clients.hpp"
#include "request.hpp"

namespace trtdet::serve {

// What was not given. The message names the limit.
class MemoryLimitError : public std::runtime_error {
public:
    // of: whose limit it is. The request's alone is more than it may ever have; the client's or that of all was reached
    // by what others hold.
    enum class Of { request, client, all };

    MemoryLimitError(Of of, const std::string& message) : std::runtime_error(message), of_(of) {}

    Of of() const { return of_; }

    // 413, 429 or 503.
    Response response() const;

private:
    Of of_;
};

// Any thread may call any member at any time.
class MemoryBudget {
    enum class Room { enough, of_client, of_all };

public:
    // what: that the memory is for, for messages: "bodies". option: that sets the limit. bytes: of all clients.
    // of_client: of each of them, at most those.
    MemoryBudget(std::string what, std::string option, std::uint64_t bytes, std::uint64_t of_client)
        : what_(std::move(what)), option_(std::move(option)), bytes_(bytes), of_client_(of_client) {}

    MemoryBudget(const MemoryBudget&) = delete;
    MemoryBudget& operator=(const MemoryBudget&) = delete;

    // A client's part of it, which goes back with the object. One thread at a time.
    class Share {
    public:
        Share(MemoryBudget& budget, std::shared_ptr<Client> client) : budget_(budget), client_(std::move(client)) {}
        ~Share();

        Share(const Share&) = delete;
        Share& operator=(const Share&) = delete;

        // Waits until there is room for so many bytes instead of what it has.
        //
        // Throws MemoryLimitError: there never will be. DeadlineError: there was none until then.
        void wait_for(std::uint64_t bytes, Clock::time_point deadline);

        // Throws MemoryLimitError: there is no room for so many bytes at this moment; it keeps what it has.
        void set(std::uint64_t bytes);

        // The same where an exception cannot be thrown; returns whether there is room. spare: bytes that have to be
        // left for all.
        bool try_set(std::uint64_t bytes, std::uint64_t spare = 0) noexcept;

        std::uint64_t bytes() const { return bytes_; }
        const MemoryBudget& budget() const { return budget_; }

        // What its client has of it, in all of its shares.
        std::uint64_t bytes_of_client() const;

        // Why there is no room for so many bytes at this moment, or was none when it was refused them.
        MemoryLimitError refusal(std::uint64_t bytes, std::uint64_t spare = 0) const;

    private:
        Room room(std::uint64_t bytes, std::uint64_t spare) const;

        MemoryBudget& budget_;
        const std::shared_ptr<Client> client_;
        std::uint64_t bytes_ = 0;
        Room refused_ = Room::of_all;
    };

    std::uint64_t taken() const;

    // The client that has most of it, by its number, and how much; 0 where nobody has any.
    struct Taken {
        std::uint64_t client = 0;
        std::uint64_t bytes = 0;
    };
    Taken most_taken() const;

private:
    Room room(const Client& client, std::uint64_t more, std::uint64_t spare = 0) const;
    void change(const Client& client, std::uint64_t from, std::uint64_t to);
    MemoryLimitError too_much(std::uint64_t bytes) const;

    const std::string what_;
    const std::string option_;
    const std::uint64_t bytes_;
    const std::uint64_t of_client_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::uint64_t taken_ = 0;
    std::unordered_map<const Client*, std::uint64_t> by_client_;
};

}  // namespace trtdet::serve
