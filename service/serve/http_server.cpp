#include "http_server.hpp"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <boost/asio/buffer.hpp>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/intrusive/list.hpp>
#include <condition_variable>
#include <ctime>
#include <deque>
#include <mutex>
#include <optional>
#include <sstream>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "threads.hpp"
#include "trtdet/errors.hpp"

namespace trtdet::serve {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using boost::asio::ip::tcp;
using boost::system::error_code;

constexpr std::size_t max_header = 16 * 1024;
constexpr std::size_t read_step = 16 * 1024;

// How many bytes of requests that come after the one in work are taken in.
constexpr std::size_t max_ahead = 16 * 1024;

// How long a client is listened to after the last answer: closing with bytes unread would reset the connection, and the
// client would lose the answer. The whole is bounded by the body timeout.
constexpr std::chrono::milliseconds linger_pause{2000};

// How long an idle connection is kept when the service stops: a request may be on its way.
constexpr std::chrono::milliseconds drain_grace{200};

// So many connections above the limit are told so; more are closed at once.
constexpr std::size_t max_refusals = 64;

// Connections to the port for probes, which are some machines' and no clients'.
constexpr std::size_t max_probes = 64;

// How long nothing is accepted after that has failed.
constexpr std::chrono::milliseconds accept_pause{100};

// The answer where there is no memory to make one, which has been made before.
std::string answer_without_memory() {
    const std::string body =
        R"({"error":{"type":"overloaded","message":"there is no memory for the request; try again later"}})"
        "\n";
    return "HTTP/1.1 503 Service Unavailable\r\nServer: trtdet-serve\r\nContent-Type: "
           "application/json\r\nContent-Length: " +
           std::to_string(body.size()) + "\r\nRetry-After: 1\r\nConnection: close\r\n\r\n" + body;
}

std::string_view to_view(boost::core::string_view text) {
    return {text.data(), text.size()};
}

std::string http_date() {
    const auto now = std::time(nullptr);
    std::tm parts{};
    ::gmtime_r(&now, &parts);
    char text[64];
    return {text, std::strftime(text, sizeof text, "%a, %d %b %Y %H:%M:%S GMT", &parts)};
}

std::string head_of(const Response& response, bool keep_alive) {
    std::string text = "HTTP/1.1 " + std::to_string(response.status) + " " +
                       std::string(to_view(http::obsolete_reason(static_cast<http::status>(response.status)))) + "\r\n";
    text += "Date: " + http_date() + "\r\nServer: trtdet-serve\r\n";
    text += "Content-Type: " + response.content_type + "\r\n";
    text += "Content-Length: " + std::to_string(response.body.size()) + "\r\n";
    for (const auto& [name, value] : response.headers) {
        text += name + ": " + value + "\r\n";
    }
    return text + (keep_alive ? "Connection: keep-alive\r\n\r\n" : "Connection: close\r\n\r\n");
}

// The bytes of bodies that are held at this moment, by connections and by work.
class Held {
public:
    Held(std::shared_ptr<std::atomic<std::uint64_t>> total, Metrics& metrics)
        : total_(std::move(total)), metrics_(metrics) {}
    ~Held() {
        *total_ -= mine_;
        metrics_.bodies(-static_cast<double>(mine_));
    }

    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

    // Returns whether there is room for so many bytes.
    bool grow_to(std::uint64_t bytes, std::uint64_t limit) {
        const auto more = bytes - mine_;
        mine_ = bytes;
        metrics_.bodies(static_cast<double>(more));
        return (*total_ += more) <= limit;
    }

private:
    const std::shared_ptr<std::atomic<std::uint64_t>> total_;
    Metrics& metrics_;
    std::uint64_t mine_ = 0;
};

}  // namespace

class HttpServer::Impl {
public:
    Impl(HttpOptions wanted, Service& what, Log& where, Metrics& counts);

    void listen();
    std::string url(bool admin) const;
    bool run();
    void stop();

private:
    class Connection;
    using Idle = boost::intrusive::list_base_hook<boost::intrusive::link_mode<boost::intrusive::auto_unlink>>;

    // Who is connected to a port.
    struct Port {
        const std::uint16_t number;
        const std::size_t most;
        const bool for_probes;
        std::size_t connected = 0;
        // Those that are between two requests, or before the first, in the order in which they will be asked to leave.
        boost::intrusive::list<
            Connection, boost::intrusive::base_hook<Idle>, boost::intrusive::constant_time_size<false>>
            idle{};
    };

    struct Listener {
        Listener(Port& its_port, const asio::strand<asio::io_context::executor_type>& strand)
            : port(its_port), acceptor(strand), pause(strand) {}

        Port& port;
        tcp::acceptor acceptor;
        asio::steady_timer pause;  // after accepting has failed
    };

    void bind(Listener& listener);
    void check(const error_code& error, std::uint16_t port) const;
    void accept(Listener& listener);
    void accept_later(Listener& listener);
    void accepted(Listener& listener, tcp::socket socket);
    void accept_what_waits(Listener& listener);
    void work();
    void set_idle(Connection& connection, bool idle);
    std::shared_ptr<Connection> take_oldest_idle(Port& port);
    bool make_room(Port& port);
    void forget(Connection& connection);
    std::vector<std::shared_ptr<Connection>> connections();

    const HttpOptions options_;
    Service& service_;
    Log& log_;
    Metrics& metrics_;
    const std::string without_memory_ = answer_without_memory();
    const std::shared_ptr<std::atomic<std::uint64_t>> held_ = std::make_shared<std::atomic<std::uint64_t>>(0);
    std::atomic<bool> draining_{false};  // connections end after their answer

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Port> ports_;  // the service's own first; they stay where they are
    std::unordered_map<const Connection*, std::weak_ptr<Connection>> connections_;
    bool stopping_ = false;
    bool closed_ = false;  // nothing is accepted any more

    // After what connections use: it destroys those that are left.
    asio::io_context context_;
    asio::strand<asio::io_context::executor_type> strand_{asio::make_strand(context_)};  // of the acceptors
    std::deque<Listener> listeners_;                                                     // of each port
    std::optional<Threads> threads_;
};

// One connection: at each moment it reads a header, reads a body, waits for an answer, writes it, or lets the client
// finish. Everything runs in its strand. A read goes on through all of that, so that a client that leaves is noticed
// and the next request is there; a timer bounds each state, and ending a state never waits for the read.
class HttpServer::Impl::Connection : public std::enable_shared_from_this<HttpServer::Impl::Connection>,
                                     public HttpServer::Impl::Idle {
public:
    Connection(Impl& server, Port& port, tcp::socket socket)
        : port_(port),
          presence_(server, *this),
          server_(server),
          socket_(std::move(socket)),
          timer_(socket_.get_executor()) {
        error_code gone;
        const auto client = socket_.remote_endpoint(gone);
        if (!gone) {
            std::ostringstream text;
            text << client;
            peer_ = text.str();
        }
    }

    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    Port& port() const { return port_; }

    void start() {
        in_strand([](Connection& self) { self.expect_request(self.server_.options_.header_timeout); });
    }

    // Says that there are too many connections, and ends.
    void start_refusing() {
        in_strand([](Connection& self) {
            self.refused_ = true;
            self.respond(busy_response("overloaded", "there are too many connections; try again later"), false);
        });
    }

    // Ends when the request that has begun, if any, is answered.
    void drain() {
        in_strand([](Connection& self) {
            if (self.state_ == State::header && !self.begun_) {
                self.arm(drain_grace);
            }
        });
    }

    // Makes room for another connection. Where a request has begun meanwhile, or waits to be read, the next one does.
    void leave_if_idle() {
        in_strand([](Connection& self) {
            error_code ignored;
            if (self.state_ == State::header && !self.begun_ && self.socket_.available(ignored) == 0) {
                return self.close();
            }
            if (self.state_ != State::closed) {
                self.server_.make_room(self.port_);
            }
        });
    }

    void cut() {
        in_strand([](Connection& self) { self.close(); });
    }

private:
    enum class State { header, body, working, writing, lingering, closed };
    using Parser = http::request_parser<http::string_body>;

    template <typename Step>
    void in_strand(Step step) {
        asio::dispatch(
            socket_.get_executor(), [self = shared_from_this(), step] { self->guarded([&] { step(*self); }); });
    }

    // Runs a step of the connection. Where it fails, and there is no memory most likely, the client is told so in a way
    // that needs none, and the connection ends.
    template <typename Step>
    void guarded(Step step) noexcept {
        try {
            return step();
        } catch (const std::exception& error) {
            server_.log_.write(Level::error, "a connection failed", error.what());
        } catch (...) {
            server_.log_.write(Level::error, "a connection failed", "unknown");
        }
        if (state_ == State::closed) {
            return;
        }
        try {
            abandon();
            held_ = nullptr;
            const bool told = answering_ || state_ == State::lingering;
            if (!told) {
                const auto& text = server_.without_memory_;
                ::send(socket_.native_handle(), text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
            }
            linger();
            if (!told) {
                auto counted = busy_response("overloaded", "there is no memory for the request");
                server_.service_.answered(head_, counted, {});
            }
        } catch (...) {
            close();
        }
    }

    void expect_request(std::chrono::milliseconds patience) {
        state_ = State::header;
        begun_ = false;
        answering_ = false;
        server_.set_idle(*this, true);
        header_size_ = 0;
        parser_.emplace();
        parser_->header_limit(static_cast<std::uint32_t>(max_header));
        parser_->body_limit(boost::none);  // refuse() says what is wrong with a Content-Length
        head_ = {};
        is_head_ = false;
        if (buffer_.empty()) {
            buffer_.shrink_to_fit();
        }
        arm(server_.draining_ ? drain_grace : patience);
        advance();
    }

    // Starts the clock of a state.
    void arm(std::chrono::milliseconds duration) {
        timer_.expires_after(duration);
        timer_.async_wait([self = shared_from_this(), round = ++round_](error_code error) {
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
                server_.metrics_.client_left();
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
        socket_.async_wait(tcp::socket::wait_read, [self = shared_from_this()](error_code error) {
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
                    server_.metrics_.client_left();
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
            server_.set_idle(*this, false);
            arm(server_.options_.header_timeout);
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
                server_.metrics_.client_left();
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
        const auto& message = parser_->get();
        head_.method = to_view(message.method_string());
        head_.target = to_view(message.target());
        head_.content_type = to_view(message[http::field::content_type]);
        head_.content_encoding = to_view(message[http::field::content_encoding]);
        head_.peer = peer_;
        head_.request_id = request_id(to_view(message["X-Request-Id"]));
        head_.traceparent = valid_traceparent(to_view(message["traceparent"]));
        head_.inference_header_length = to_view(message["Inference-Header-Content-Length"]);
        head_.chunked = parser_->chunked();
        if (const auto length = parser_->content_length()) {
            head_.length = *length;
        }
        is_head_ = message.method() == http::verb::head;
        if (message.version() == 11 && message.count(http::field::host) != 1) {
            return respond(error_response(400, "malformed-http", "the request has no Host, or several"), false);
        }
        if (message.version() != 11 && message.version() != 10) {
            return respond(error_response(505, "http-version", "the version is not HTTP/1.0 or HTTP/1.1"), false);
        }
        if (message.count(http::field::transfer_encoding) > 0 &&
            !boost::beast::iequals(message[http::field::transfer_encoding], "chunked")) {
            return respond(
                error_response(
                    501, "transfer-encoding", "the Transfer-Encoding is not chunked, the only one that is taken"),
                false);
        }
        const auto expect = message[http::field::expect];
        if (!expect.empty() && !boost::beast::iequals(expect, "100-continue")) {
            return respond(
                error_response(417, "expectation-failed", "the request expects something else than 100-continue"),
                false);
        }
        if (port_.for_probes && message.method() != http::verb::get && !is_head_) {
            auto refusal = error_response(405, "method-not-allowed", "this port takes no more than GET and HEAD");
            refusal.headers.emplace_back("Allow", "GET, HEAD");
            return respond(std::move(refusal), !has_body() && may_keep_alive());
        }
        if (auto refusal = server_.service_.refuse(head_)) {
            return respond(std::move(*refusal), !has_body() && may_keep_alive());
        }
        if (!has_body()) {
            return work();
        }
        state_ = State::body;
        held_ = std::make_shared<Held>(server_.held_, server_.metrics_);
        parser_->body_limit(server_.service_.options().max_body);
        parser_->eager(true);
        arm(server_.options_.body_timeout);
        // Who waits for leave to send has sent nothing yet.
        if (!expect.empty() && buffer_.empty()) {
            return write_continue();
        }
        read_body();
    }

    bool has_body() const { return head_.chunked || head_.length.value_or(0) > 0; }

    void write_continue() {
        static constexpr std::string_view line = "HTTP/1.1 100 Continue\r\n\r\n";
        asio::async_write(
            socket_, asio::buffer(line.data(), line.size()),
            [self = shared_from_this()](error_code error, std::size_t) {
                // A header that ran out of time meanwhile is answered already.
                if (self->state_ != State::body) {
                    return;
                }
                if (error) {
                    self->server_.metrics_.client_left();
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
                const auto most = std::to_string(server_.service_.options().max_body);
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
        if (!held_->grow_to(parser_->get().body().size(), server_.options_.max_bodies)) {
            return respond(busy_response("overloaded", "the service holds too many bodies; try again later"), false);
        }
        if (parser_->is_done()) {
            return work();
        }
        if (buffer_.size() > max_header) {
            return respond(error_response(400, "malformed-http", "a chunk's header or the trailer is too long"), false);
        }
        if (ended_) {
            server_.metrics_.client_left();
            return close();
        }
        read();
    }

    void work() {
        state_ = State::working;
        arrived_ = Clock::now();
        abandoned_ = std::make_shared<std::atomic<bool>>(false);
        arm(server_.service_.options().request_timeout);
        Request request{head_, std::move(parser_->get().body()), arrived_, abandoned_, std::move(held_)};
        held_ = nullptr;
        server_.service_.handle(std::move(request), [self = shared_from_this(), round = ++request_](Answer answer) {
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
                self->server_.log_.write(Level::error, "an answer was lost", error.what());
            }
        });
        if (state_ == State::working) {
            advance();
        }
    }

    bool may_keep_alive() const { return parser_->get().keep_alive() && !server_.draining_; }

    void abandon() {
        if (abandoned_) {
            *abandoned_ = true;
        }
    }

    void respond(Response response, bool keep_alive) {
        const auto took = state_ == State::working ? Clock::now() - arrived_ : Clock::duration{};
        server_.service_.answered(head_, response, took);
        state_ = State::writing;
        held_ = nullptr;
        closing_ = !keep_alive;
        response_head_ = head_of(response, keep_alive);
        response_body_ = is_head_ ? std::string() : std::move(response.body);
        arm(server_.options_.write_timeout);
        answering_ = true;
        const std::array<asio::const_buffer, 2> both{asio::buffer(response_head_), asio::buffer(response_body_)};
        asio::async_write(socket_, both, [self = shared_from_this()](error_code error, std::size_t) {
            if (self->state_ == State::closed) {
                return;
            }
            if (error) {
                self->server_.metrics_.client_left();
                return self->close();
            }
            self->guarded([&] { self->written(); });
        });
    }

    void written() {
        response_body_ = {};
        // Who has ended his sending may have sent more requests before that.
        if (!closing_ && (!ended_ || !buffer_.empty())) {
            return expect_request(server_.options_.idle_timeout);
        }
        linger();
    }

    void linger() {
        error_code ignored;
        socket_.shutdown(tcp::socket::shutdown_send, ignored);
        state_ = State::lingering;
        linger_end_ = Clock::now() + (server_.draining_ || refused_ ? linger_pause : server_.options_.body_timeout);
        advance();
    }

    void close() {
        if (state_ == State::closed) {
            return;
        }
        state_ = State::closed;
        server_.set_idle(*this, false);
        abandon();
        held_ = nullptr;
        ++round_;
        timer_.cancel();
        error_code ignored;
        socket_.close(ignored);
    }

    // As long as one is there, the server does not end.
    class Presence {
    public:
        Presence(Impl& server, Connection& connection) : server_(server), connection_(connection) {
            const std::lock_guard lock(server_.mutex_);
            ++connection_.port().connected;
            server_.metrics_.connections(+1);
        }
        ~Presence() {
            server_.metrics_.connections(-1);
            server_.forget(connection_);
        }
        Presence(const Presence&) = delete;
        Presence& operator=(const Presence&) = delete;

    private:
        Impl& server_;
        Connection& connection_;
    };

    Port& port_;
    const Presence presence_;  // before the others, so that it goes when all others are gone, which need the server
    Impl& server_;
    tcp::socket socket_;
    std::string peer_;
    asio::steady_timer timer_;
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
    std::optional<Parser> parser_;
    Head head_;
    bool is_head_ = false;
    std::shared_ptr<Held> held_;
    Clock::time_point arrived_;
    std::uint64_t request_ = 0;
    std::shared_ptr<std::atomic<bool>> abandoned_;
    bool closing_ = false;
    std::string response_head_;
    std::string response_body_;
    Clock::time_point linger_end_;
};

HttpServer::Impl::Impl(HttpOptions wanted, Service& what, Log& where, Metrics& counts)
    : options_(std::move(wanted)), service_(what), log_(where), metrics_(counts), context_(options_.threads) {
    ports_.push_back({options_.port, static_cast<std::size_t>(options_.max_connections), false});
    if (options_.admin_port) {
        ports_.push_back({*options_.admin_port, max_probes, true});
    }
    for (auto& port : ports_) {
        bind(listeners_.emplace_back(port, strand_));
    }
}

void HttpServer::Impl::check(const error_code& error, std::uint16_t port) const {
    if (error) {
        throw Error(
            "cannot listen on " + options_.host + " port " + std::to_string(port) + ": " + error.message() +
            "; choose another with --host, --port and --admin-port");
    }
}

void HttpServer::Impl::bind(Listener& listener) {
    error_code error;
    tcp::resolver resolver(context_);
    const auto found = resolver.resolve(
        options_.host, std::to_string(listener.port.number), tcp::resolver::passive | tcp::resolver::numeric_service,
        error);
    check(error, listener.port.number);
    const auto endpoint = found.begin()->endpoint();
    listener.acceptor.open(endpoint.protocol(), error);
    check(error, listener.port.number);
    // A service that is started again must not wait for the old one's connections to time out.
    listener.acceptor.set_option(tcp::acceptor::reuse_address(true), error);
    check(error, listener.port.number);
    listener.acceptor.bind(endpoint, error);
    check(error, listener.port.number);
}

void HttpServer::Impl::listen() {
    threads_.emplace(context_, options_.threads, [this] { work(); });
    for (auto& listener : listeners_) {
        error_code error;
        listener.acceptor.listen(asio::socket_base::max_listen_connections, error);
        check(error, listener.port.number);
    }
}

std::string HttpServer::Impl::url(bool admin) const {
    const auto endpoint = listeners_.at(admin ? 1 : 0).acceptor.local_endpoint();
    const auto address = endpoint.address().to_string();
    return "http://" + (endpoint.address().is_v6() ? "[" + address + "]" : address) + ":" +
           std::to_string(endpoint.port());
}

void HttpServer::Impl::accept(Listener& listener) try {
    listener.acceptor.async_accept(
        asio::make_strand(context_), [this, &listener](error_code error, tcp::socket socket) {
            if (!listener.acceptor.is_open() || error == asio::error::operation_aborted) {
                return;
            }
            if (error) {
                // Out of descriptors, most likely: trying at once would fail again.
                try {
                    log_.write(Level::warning, "a connection could not be accepted", error.message().c_str());
                    make_room(listener.port);
                } catch (const std::exception&) {
                    // No memory either: it is tried again all the same.
                }
                return accept_later(listener);
            }
            try {
                accepted(listener, std::move(socket));
            } catch (const std::exception& failure) {
                log_.write(Level::error, "a connection could not be served", failure.what());
            }
            accept(listener);
        });
} catch (const std::bad_alloc&) {
    // Or nobody could ever connect again.
    accept_later(listener);
}

void HttpServer::Impl::accept_later(Listener& listener) {
    while (true) {
        try {
            listener.pause.expires_after(accept_pause);
            return listener.pause.async_wait([this, &listener](error_code stopped) {
                if (!stopped && listener.acceptor.is_open()) {
                    accept(listener);
                }
            });
        } catch (const std::bad_alloc&) {
            std::this_thread::sleep_for(accept_pause);
        }
    }
}

void HttpServer::Impl::accepted(Listener& listener, tcp::socket socket) {
    error_code ignored;
    socket.set_option(tcp::no_delay(true), ignored);
    socket.non_blocking(true, ignored);  // it is read where it is said to be readable
    auto connection = std::make_shared<Connection>(*this, listener.port, std::move(socket));
    std::size_t count = 0;
    {
        const std::lock_guard lock(mutex_);
        connections_[connection.get()] = connection;
        count = listener.port.connected;
    }
    if (count <= listener.port.most) {
        return connection->start();
    }
    if (make_room(listener.port)) {
        connection->start();
    } else if (count <= listener.port.most + max_refusals) {
        connection->start_refusing();
    }
}

// The kernel has shaken hands with who waits in its queue: to them the service was there.
void HttpServer::Impl::accept_what_waits(Listener& listener) {
    error_code error;
    listener.acceptor.non_blocking(true, error);
    while (!error) {
        tcp::socket socket(asio::make_strand(context_));
        listener.acceptor.accept(socket, error);
        if (!error) {
            accepted(listener, std::move(socket));
        }
    }
}

void HttpServer::Impl::set_idle(Connection& connection, bool idle) {
    const std::lock_guard lock(mutex_);
    connection.unlink();
    if (idle) {
        connection.port().idle.push_back(connection);
    }
}

// Nothing where all connections have requests.
std::shared_ptr<HttpServer::Impl::Connection> HttpServer::Impl::take_oldest_idle(Port& port) {
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

// Returns whether there is somebody who can be asked to leave.
bool HttpServer::Impl::make_room(Port& port) {
    const auto idle = take_oldest_idle(port);
    if (idle) {
        idle->leave_if_idle();
    }
    return idle != nullptr;
}

void HttpServer::Impl::forget(Connection& connection) {
    const std::lock_guard lock(mutex_);
    connection.unlink();
    --connection.port().connected;
    connections_.erase(&connection);
    changed_.notify_all();
}

std::vector<std::shared_ptr<HttpServer::Impl::Connection>> HttpServer::Impl::connections() {
    std::vector<std::shared_ptr<Connection>> all;
    const std::lock_guard lock(mutex_);
    for (const auto& [key, connection] : connections_) {
        if (auto held = connection.lock()) {
            all.push_back(std::move(held));
        }
    }
    return all;
}

void HttpServer::Impl::work() {
    while (true) {
        try {
            context_.run();
            return;
        } catch (const std::exception& error) {
            // Connections and acceptors see to themselves; what is left is what asio itself has no memory for.
            log_.write(Level::error, "the server failed", error.what());
        }
    }
}

bool HttpServer::Impl::run() {
    asio::post(strand_, [this] {
        for (auto& listener : listeners_) {
            accept(listener);
        }
    });
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return stopping_; });
    lock.unlock();

    service_.leave();
    log_.write(Level::info, "stops");
    std::this_thread::sleep_for(options_.drain_delay);
    draining_ = true;
    asio::post(strand_, [this] {
        for (auto& listener : listeners_) {
            try {
                accept_what_waits(listener);
            } catch (const std::exception& error) {
                log_.write(Level::error, "a connection could not be served", error.what());
            }
            error_code ignored;
            listener.acceptor.close(ignored);
            listener.pause.cancel();
        }
        for (const auto& connection : connections()) {
            connection->drain();
        }
        const std::lock_guard closing(mutex_);
        closed_ = true;
        changed_.notify_all();
    });

    lock.lock();
    const bool finished =
        changed_.wait_for(lock, options_.stop_timeout, [this] { return closed_ && connections_.empty(); });
    const auto left = connections_.size();
    lock.unlock();
    if (!finished) {
        log_.write(Level::error, "connections were cut, as --stop-timeout was over", {{"count", left}});
        for (const auto& connection : connections()) {
            connection->cut();
        }
    }
    threads_.reset();
    return finished;
}

void HttpServer::Impl::stop() {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
}

HttpServer::HttpServer(HttpOptions options, Service& service, Log& log, Metrics& metrics)
    : impl_(std::make_unique<Impl>(std::move(options), service, log, metrics)) {}

HttpServer::~HttpServer() = default;

void HttpServer::listen() {
    impl_->listen();
}

std::string HttpServer::url() const {
    return impl_->url(false);
}

std::string HttpServer::admin_url() const {
    return impl_->url(true);
}

bool HttpServer::run() {
    return impl_->run();
}

void HttpServer::stop() {
    impl_->stop();
}

}  // namespace trtdet::serve
