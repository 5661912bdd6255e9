#include "connection.hpp"

#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <exception>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

namespace trtdet::serve {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using boost::asio::ip::tcp;
using boost::system::error_code;

constexpr std::size_t read_step = 16 * 1024;

// How many bytes of requests that come after the one in work are taken in.
constexpr std::size_t max_ahead = 16 * 1024;

// How long a client is listened to after the last answer: closing with bytes unread would reset the connection, and the
// client would lose the answer. The whole is bounded by the body timeout.
constexpr std::chrono::milliseconds linger_pause{2000};

// How long an idle connection is kept when the service stops: a request may be on its way.
constexpr std::chrono::milliseconds drain_grace{200};

// How often, and how long, a body waits for another one to go.
constexpr int most_tries = 50;
constexpr std::chrono::milliseconds pause_between_tries{10};

// One connection: at each moment it reads a header, reads a body, waits for an answer, writes it, or lets the client
// finish. Everything runs in its strand. A read goes on through all of that, so that a client that leaves is noticed
// and the next request is there; a timer bounds each state, and ending a state never waits for the read.
class HttpConnection : public Connection {
public:
    HttpConnection(Serving& server, Port& port, std::shared_ptr<Client> client, tcp::socket socket)
        : Connection(port, std::move(client)),
          presence_(server.connections, *this),
          server_(server),
          socket_(std::move(socket)),
          timer_(socket_.get_executor()),
          pause_(socket_.get_executor()) {
        error_code gone;
        const auto end = socket_.remote_endpoint(gone);
        if (!gone) {
            std::ostringstream text;
            text << end;
            peer_ = text.str();
        }
    }

    void start() override {
        in_strand([](HttpConnection& self) { self.expect_request(self.server_.options.header_timeout); });
    }

    void start_refusing(Response refusal) override {
        in_strand([refusal = std::move(refusal)](HttpConnection& self) mutable {
            self.refused_ = true;
            self.respond(std::move(refusal), false);
        });
    }

    void drain() override {
        in_strand([](HttpConnection& self) {
            if (self.state_ == State::header && !self.begun_) {
                self.arm(drain_grace);
            }
        });
    }

    void leave(bool of_client) override {
        in_strand([of_client](HttpConnection& self) {
            error_code ignored;
            if (self.state_ == State::lingering ||
                (self.state_ == State::header && !self.begun_ && self.socket_.available(ignored) == 0)) {
                return self.close();
            }
            if (self.begun_ && (self.state_ == State::header || self.state_ == State::body)) {
                return self.respond(
                    error_response(
                        408, "request-timeout",
                        "the request had not arrived when others needed the room; send it again, and faster"),
                    false);
            }
            if (self.state_ != State::closed) {
                self.server_.connections.make_room(self.port(), of_client ? self.client().get() : nullptr);
            }
        });
    }

    void cut() override {
        in_strand([](HttpConnection& self) { self.close(); });
    }

private:
    enum class State { header, body, working, writing, lingering, closed };

    std::shared_ptr<HttpConnection> shared_self() {
        return std::static_pointer_cast<HttpConnection>(shared_from_this());
    }

    template <typename Step>
    void in_strand(Step step) {
        asio::dispatch(socket_.get_executor(), [self = shared_self(), step = std::move(step)]() mutable {
            self->guarded([&] { step(*self); });
        });
    }

    // Runs a step of the connection. Where it fails, and there is no memory most likely, the client is told so in a way
    // that needs none, and the connection ends.
    template <typename Step>
    void guarded(Step step) noexcept {
        try {
            return step();
        } catch (const std::exception& error) {
            server_.log.write(Level::error, "a connection failed", error.what());
        } catch (...) {
            server_.log.write(Level::error, "a connection failed", "unknown");
        }
        if (state_ == State::closed) {
            return;
        }
        try {
            abandon();
            held_ = nullptr;
            const bool told = answering_ || state_ == State::lingering;
            if (!told) {
                const auto& text = server_.without_memory;
                ::send(socket_.native_handle(), text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
            }
            linger();
            if (!told) {
                auto counted = busy_response("overloaded", "there is no memory for the request");
                server_.service.answered(head_, counted, {});
            }
        } catch (...) {
            close();
        }
    }

    void expect_request(std::chrono::milliseconds patience) {
        state_ = State::header;
        begun_ = false;
        answering_ = false;
        server_.connections.set_waiting(*this, Connections::Waits::for_request);
        header_size_ = 0;
        parser_.emplace();
        parser_->header_limit(static_cast<std::uint32_t>(max_header));
        parser_->body_limit(boost::none);  // refuse() says what is wrong with a Content-Length
        head_ = {};
        is_head_ = false;
        if (buffer_.empty()) {
            buffer_.shrink_to_fit();
        }
        arm(server_.draining ? drain_grace : patience);
        advance();
    }

    // Starts the clock of a state.
    void arm(std::chrono::milliseconds duration) {
        timer_.expires_after(duration);
        timer_.async_wait([self = shared_self(), round = ++round_](error_code error) {
            if (!error && round == self->round_) {
                self->guarded([&] { self->expired(); });
            }
        });
    }

    void expired() {
        switch (state_) {
            case State::header:
                if (!begun_) {
                    return close();
                }
                return respond(
                    error_response(408, "request-timeout", "the header did not arrive within the time for it"), false);
            case State::body:
                return respond(
                    error_response(408, "request-timeout", "the body did not arrive within the time for it"), false);
            case State::working:
                abandon();
                return respond(
                    error_response(504, "deadline-exceeded", "the request was not finished within the time for it"),
                    may_keep_alive());
            case State::writing:
                server_.metrics.client_left();
                return close();
            case State::lingering:
            case State::closed:
                return close();
        }
    }

    void read() {
        if (reading_ || ended_ || state_ == State::closed) {
            return;
        }
        reading_ = true;
        // Taken from the socket in the strand: whoever asks for what is available there sees all that was not looked
        // at.
        socket_.async_wait(tcp::socket::wait_read, [self = shared_self()](error_code error) {
            self->reading_ = false;
            if (self->state_ == State::closed) {
                return;
            }
            self->guarded([&] {
                const std::size_t count = error ? 0 : self->socket_.read_some(asio::buffer(self->chunk_), error);
                self->buffer_.append(self->chunk_.data(), count);
                if (error && error != asio::error::would_block) {
                    self->ended_ = true;
                    self->reset_ = error != asio::error::eof;
                }
                self->advance();
            });
        });
    }

    // Does what the bytes that are here allow, and asks for more where they do not suffice.
    void advance() {
        switch (state_) {
            case State::header:
                return read_header();
            case State::body:
                return read_body();
            case State::working:
                // Who only ended his sending may still want the answer; who is gone for sure does not.
                if (reset_) {
                    abandon();
                    server_.metrics.client_left();
                    return close();
                }
                if (buffer_.size() < max_ahead) {
                    read();
                }
                return;
            case State::writing:
                return;
            case State::lingering:
                buffer_.clear();
                if (ended_) {
                    return close();
                }
                arm(std::min(linger_pause, left_until(linger_end_)));
                return read();
            case State::closed:
                return;
        }
    }

    static std::chrono::milliseconds left_until(Clock::time_point end) {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
        return std::max(left, std::chrono::milliseconds(0));
    }

    void read_header() {
        // Some clients send an empty line after a body; RFC 9112, 2.2 wants it ignored.
        while (!begun_ && buffer_.compare(0, 2, "\r\n") == 0) {
            buffer_.erase(0, 2);
        }
        if (!buffer_.empty() && !begun_) {
            begun_ = true;
            server_.connections.set_waiting(*this, Connections::Waits::for_rest);
            arm(server_.options.header_timeout);
        }
        error_code error;
        if (!buffer_.empty()) {
            const auto used = parser_->put(asio::buffer(buffer_), error);
            header_size_ += used;
            buffer_.erase(0, used);
        }
        if (error == http::error::need_more) {
            error = {};
        }
        // The parser's own limit is for what is parsed at a time.
        const auto size = header_size_ + (parser_->is_header_done() ? 0 : buffer_.size());
        if (!error && size > max_header) {
            error = http::error::header_limit;
        }
        if (error) {
            return refuse_header(error);
        }
        if (parser_->is_header_done()) {
            return take_header();
        }
        if (ended_) {
            if (begun_) {
                server_.metrics.client_left();
            }
            return close();
        }
        read();
    }

    void refuse_header(error_code error) {
        if (error == http::error::header_limit) {
            if (header_size_ == 0 && buffer_.find("\r\n") == std::string::npos) {
                return respond(error_response(414, "uri-too-long", "the request's first line is too long"), false);
            }
            return respond(
                error_response(
                    431, "headers-too-large", "the header is longer than " + std::to_string(max_header) + " bytes"),
                false);
        }
        respond(error_response(400, "malformed-http", "the request is not HTTP: " + error.message()), false);
    }

    void take_header() {
        head_ = head_of(*parser_, peer_, client());
        head_.admin = port().for_probes;
        is_head_ = head_.method == "HEAD";
        if (auto refusal = check_header(*parser_)) {
            return respond(std::move(*refusal), false);
        }
        if (auto refusal = server_.service.refuse(head_)) {
            return respond(std::move(*refusal), !has_body(head_) && may_keep_alive());
        }
        if (!has_body(head_)) {
            return work();
        }
        state_ = State::body;
        held_ = server_.service.body_of(head_);
        tries_ = 0;
        parser_->body_limit(server_.service.options().max_body);
        parser_->eager(true);
        arm(server_.options.body_timeout);
        // Who waits for leave to send has sent nothing yet.
        if (head_.expects_continue && buffer_.empty()) {
            return write_continue();
        }
        read_body();
    }

    void write_continue() {
        static constexpr std::string_view line = "HTTP/1.1 100 Continue\r\n\r\n";
        asio::async_write(
            socket_, asio::buffer(line.data(), line.size()), [self = shared_self()](error_code error, std::size_t) {
                // A header that ran out of time meanwhile is answered already.
                if (self->state_ != State::body) {
                    return;
                }
                if (error) {
                    self->server_.metrics.client_left();
                    return self->close();
                }
                self->guarded([&] { self->read_body(); });
            });
    }

    void read_body() {
        while (!buffer_.empty() && !parser_->is_done()) {
            error_code error;
            const auto used = parser_->put(asio::buffer(buffer_), error);
            buffer_.erase(0, used);
            if (error == http::error::need_more || (!error && used == 0)) {
                break;
            }
            if (error == http::error::body_limit) {
                const auto most = std::to_string(server_.service.options().max_body);
                return respond(
                    error_response(
                        413, "body-too-large", "the body has more than the " + most + " bytes that are allowed"),
                    false);
            }
            if (error) {
                return respond(
                    error_response(400, "malformed-http", "the body is not what its header says: " + error.message()),
                    false);
            }
        }
        if (!hold_body()) {
            return;
        }
        if (parser_->is_done()) {
            return work();
        }
        if (buffer_.size() > max_header) {
            return respond(error_response(400, "malformed-http", "a chunk's header or the trailer is too long"), false);
        }
        if (ended_) {
            server_.metrics.client_left();
            return close();
        }
        read();
    }

    // What has arrived of the body is charged. Where all of the memory for bodies is taken, the client that has most of
    // it loses the request that it has been sending for longest, and this one waits a moment. Returns whether to go on.
    bool hold_body() {
        const auto& body = parser_->get().body();
        // Where the length is not known the body takes room ahead.
        const auto bytes = head_.chunked ? body.capacity() : body.size();
        if (held_->try_set(bytes)) {
            return true;
        }
        const auto refusal = held_->refusal(bytes);
        if (refusal.of() != MemoryLimitError::Of::all || tries_++ >= most_tries ||
            !server_.connections.drop_slowest(*this, held_->budget().most_taken().client)) {
            respond(refusal.response(), false);
            return false;
        }
        pause_.expires_after(pause_between_tries);
        pause_.async_wait([self = shared_self(), round = round_](error_code error) {
            if (!error && self->state_ == State::body && round == self->round_) {
                self->guarded([&] { self->read_body(); });
            }
        });
        return false;
    }

    void work() {
        state_ = State::working;
        server_.connections.set_waiting(*this, Connections::Waits::not_at_all);
        arrived_ = Clock::now();
        abandoned_ = std::make_shared<std::atomic<bool>>(false);
        arm(server_.service.options().request_timeout);
        Request request{head_, std::move(parser_->get().body()), arrived_, abandoned_, std::move(held_)};
        held_ = nullptr;
        server_.service.handle(std::move(request), [self = shared_self(), round = ++request_](Answer answer) {
            try {
                asio::dispatch(self->socket_.get_executor(), [self, round, answer = std::move(answer)]() mutable {
                    self->guarded([&] {
                        if (self->state_ == State::working && round == self->request_) {
                            auto response = answer();
                            answer = nullptr;
                            self->respond(std::move(response), self->may_keep_alive());
                        }
                    });
                });
            } catch (const std::exception& error) {
                // Who worked on it can do nothing about that; the request ends by its deadline.
                self->server_.log.write(Level::error, "an answer was lost", error.what());
            }
        });
        if (state_ == State::working) {
            advance();
        }
    }

    bool may_keep_alive() const { return parser_->get().keep_alive() && !server_.draining; }

    void abandon() {
        if (abandoned_) {
            *abandoned_ = true;
        }
    }

    void respond(Response response, bool keep_alive) {
        const auto took = state_ == State::working ? Clock::now() - arrived_ : Clock::duration{};
        server_.service.answered(head_, response, took);
        state_ = State::writing;
        server_.connections.set_waiting(*this, Connections::Waits::not_at_all);
        // What is charged no more is not kept.
        if (parser_) {
            std::string().swap(parser_->get().body());
        }
        held_ = nullptr;
        answer_held_ = std::move(response.held);
        closing_ = !keep_alive;
        response_head_ = header_text(response, keep_alive);
        response_body_ = is_head_ ? std::string() : std::move(response.body);
        arm(server_.options.write_timeout);
        answering_ = true;
        const std::array<asio::const_buffer, 2> both{asio::buffer(response_head_), asio::buffer(response_body_)};
        asio::async_write(socket_, both, [self = shared_self()](error_code error, std::size_t) {
            if (self->state_ == State::closed) {
                return;
            }
            if (error) {
                self->server_.metrics.client_left();
                return self->close();
            }
            self->guarded([&] { self->written(); });
        });
    }

    void written() {
        response_body_ = {};
        answer_held_ = nullptr;
        // Who has ended his sending may have sent more requests before that.
        if (!closing_ && (!ended_ || !buffer_.empty())) {
            return expect_request(server_.options.idle_timeout);
        }
        linger();
    }

    void linger() {
        error_code ignored;
        socket_.shutdown(tcp::socket::shutdown_send, ignored);
        state_ = State::lingering;
        server_.connections.set_waiting(*this, Connections::Waits::for_end);
        linger_end_ = Clock::now() + (server_.draining || refused_ ? linger_pause : server_.options.body_timeout);
        advance();
    }

    void close() {
        if (state_ == State::closed) {
            return;
        }
        state_ = State::closed;
        server_.connections.set_waiting(*this, Connections::Waits::not_at_all);
        abandon();
        held_ = nullptr;
        ++round_;
        timer_.cancel();
        error_code ignored;
        socket_.close(ignored);
    }

    const Connections::Presence
        presence_;  // before the others, so that it goes when all others are gone, which need the server
    Serving& server_;
    tcp::socket socket_;
    std::string peer_;
    asio::steady_timer timer_;
    asio::steady_timer pause_;
    std::uint64_t round_ = 0;  // of the timer: an older one that fires late means nothing
    State state_ = State::header;
    std::array<char, read_step> chunk_;  // of the read that goes on
    std::string buffer_;                 // what has arrived and was not taken yet
    bool reading_ = false;
    bool ended_ = false;           // the client sends nothing more
    bool reset_ = false;           // and is gone
    bool begun_ = false;           // a byte of the request has arrived
    std::size_t header_size_ = 0;  // what was taken of the header
    bool refused_ = false;         // the connection is one too many
    bool answering_ = false;       // a byte of the answer may have been sent
    std::optional<RequestParser> parser_;
    Head head_;
    bool is_head_ = false;
    std::shared_ptr<MemoryBudget::Share> held_;  // the body
    int tries_ = 0;                              // to hold more of it
    Clock::time_point arrived_;
    std::uint64_t request_ = 0;
    std::shared_ptr<std::atomic<bool>> abandoned_;
    bool closing_ = false;
    std::string response_head_;
    std::string response_body_;
    std::shared_ptr<void> answer_held_;
    Clock::time_point linger_end_;
};

}  // namespace

std::shared_ptr<Connection> make_connection(Serving& server, Port& port, tcp::socket socket) {
    error_code gone;
    auto client = server.service.clients().of(socket.remote_endpoint(gone).address());
    return std::make_shared<HttpConnection>(server, port, std::move(client), std::move(socket));
}

}  // namespace trtdet::serve
