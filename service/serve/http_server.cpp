#include "http_server.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <boost/asio/buffer.hpp>
#include <boost/asio/dispatch.hpp>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core/string.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <condition_variable>
#include <ctime>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

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
constexpr int max_refusals = 64;

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
    std::string url() const;
    bool run();
    void stop();

private:
    class Connection;

    void bind();
    void check(const error_code& error) const;
    void accept();
    void accepted(tcp::socket socket);
    void accept_what_waits();
    void work();
    void forget(const Connection* connection);
    std::vector<std::shared_ptr<Connection>> connections();

    const HttpOptions options_;
    Service& service_;
    Log& log_;
    Metrics& metrics_;
    const std::shared_ptr<std::atomic<std::uint64_t>> held_ = std::make_shared<std::atomic<std::uint64_t>>(0);
    std::atomic<bool> draining_{false};  // connections end after their answer

    std::mutex mutex_;
    std::condition_variable changed_;
    std::unordered_map<const Connection*, std::weak_ptr<Connection>> connections_;
    bool stopping_ = false;
    bool closed_ = false;  // nothing is accepted any more

    // After what connections use: it destroys those that are left.
    asio::io_context context_;
    asio::strand<asio::io_context::executor_type> strand_{asio::make_strand(context_)};  // of the acceptor
    tcp::acceptor acceptor_{strand_};
    asio::steady_timer pause_{strand_};  // after accepting has failed
};

// One connection: at each moment it reads a header, reads a body, waits for an answer, writes it, or lets the client
// finish. Everything runs in its strand. A read goes on through all of that, so that a client that leaves is noticed
// and the next request is there; a timer bounds each state, and ending a state never waits for the read.
class HttpServer::Impl::Connection : public std::enable_shared_from_this<HttpServer::Impl::Connection> {
public:
    Connection(Impl& server, tcp::socket socket)
        : presence_(server, this), server_(server), socket_(std::move(socket)), timer_(socket_.get_executor()) {}

    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    void start() {
        asio::dispatch(socket_.get_executor(), [self = shared_from_this()] {
            self->expect_request(self->server_.options_.header_timeout);
        });
    }

    // Says that there are too many connections, and ends.
    void start_refusing() {
        asio::dispatch(socket_.get_executor(), [self = shared_from_this()] {
            self->refused_ = true;
            self->respond(busy_response("overloaded", "there are too many connections; try again later"), false);
        });
    }

    // Ends when the request that has begun, if any, is answered.
    void drain() {
        asio::dispatch(socket_.get_executor(), [self = shared_from_this()] {
            if (self->state_ == State::header && !self->begun_) {
                self->arm(drain_grace);
            }
        });
    }

    void cut() {
        asio::dispatch(socket_.get_executor(), [self = shared_from_this()] { self->close(); });
    }

private:
    enum class State { header, body, working, writing, lingering, closed };
    using Parser = http::request_parser<http::string_body>;

    void expect_request(std::chrono::milliseconds patience) {
        state_ = State::header;
        begun_ = false;
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
                self->expired();
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
        // Not into buffer_: what was read before may be taken out of it meanwhile.
        socket_.async_read_some(asio::buffer(chunk_), [self = shared_from_this()](error_code error, std::size_t count) {
            self->reading_ = false;
            if (self->state_ == State::closed) {
                return;
            }
            self->buffer_.append(self->chunk_.data(), count);
            if (error) {
                self->ended_ = true;
                self->reset_ = error != asio::error::eof;
            }
            self->advance();
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
                self->read_body();
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
            asio::dispatch(self->socket_.get_executor(), [self, round, answer = std::move(answer)]() mutable {
                if (self->state_ == State::working && round == self->request_) {
                    auto response = answer();
                    answer = nullptr;
                    self->respond(std::move(response), self->may_keep_alive());
                }
            });
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
        const std::array<asio::const_buffer, 2> both{asio::buffer(response_head_), asio::buffer(response_body_)};
        asio::async_write(socket_, both, [self = shared_from_this()](error_code error, std::size_t) {
            if (self->state_ == State::closed) {
                return;
            }
            if (error) {
                self->server_.metrics_.client_left();
                return self->close();
            }
            self->written();
        });
    }

    void written() {
        response_body_ = {};
        if (!closing_ && !ended_) {
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
        abandon();
        held_ = nullptr;
        timer_.cancel();
        error_code ignored;
        socket_.close(ignored);
    }

    // As long as one is there, the server does not end.
    class Presence {
    public:
        Presence(Impl& server, const Connection* connection) : server_(server), connection_(connection) {
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
        const Connection* connection_;
    };

    const Presence presence_;  // the first, so that it goes when all others are gone, which need the server
    Impl& server_;
    tcp::socket socket_;
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
    bind();
}

void HttpServer::Impl::check(const error_code& error) const {
    if (error) {
        throw Error(
            "cannot listen on " + options_.host + " port " + std::to_string(options_.port) + ": " + error.message() +
            "; choose another with --host and --port");
    }
}

void HttpServer::Impl::bind() {
    error_code error;
    tcp::resolver resolver(context_);
    const auto found = resolver.resolve(
        options_.host, std::to_string(options_.port), tcp::resolver::passive | tcp::resolver::numeric_service, error);
    check(error);
    const auto endpoint = found.begin()->endpoint();
    acceptor_.open(endpoint.protocol(), error);
    check(error);
    // A service that is started again must not wait for the old one's connections to time out.
    acceptor_.set_option(tcp::acceptor::reuse_address(true), error);
    check(error);
    acceptor_.bind(endpoint, error);
    check(error);
}

void HttpServer::Impl::listen() {
    error_code error;
    acceptor_.listen(asio::socket_base::max_listen_connections, error);
    check(error);
}

std::string HttpServer::Impl::url() const {
    const auto endpoint = acceptor_.local_endpoint();
    const auto address = endpoint.address().to_string();
    return "http://" + (endpoint.address().is_v6() ? "[" + address + "]" : address) + ":" +
           std::to_string(endpoint.port());
}

void HttpServer::Impl::accept() {
    acceptor_.async_accept(asio::make_strand(context_), [this](error_code error, tcp::socket socket) {
        if (!acceptor_.is_open()) {
            return;
        }
        if (!error) {
            accepted(std::move(socket));
            return accept();
        }
        if (error == asio::error::operation_aborted) {
            return;
        }
        log_.write(Level::warning, "a connection could not be accepted", {{"reason", error.message()}});
        // Out of descriptors, most likely: trying at once would fail again.
        pause_.expires_after(std::chrono::milliseconds(100));
        pause_.async_wait([this](error_code stopped) {
            if (!stopped && acceptor_.is_open()) {
                accept();
            }
        });
    });
}

void HttpServer::Impl::accepted(tcp::socket socket) {
    error_code ignored;
    socket.set_option(tcp::no_delay(true), ignored);
    auto connection = std::make_shared<Connection>(*this, std::move(socket));
    std::size_t count = 0;
    {
        const std::lock_guard lock(mutex_);
        connections_[connection.get()] = connection;
        count = connections_.size();
    }
    const auto most = static_cast<std::size_t>(options_.max_connections);
    if (count <= most) {
        connection->start();
    } else if (count <= most + max_refusals) {
        connection->start_refusing();
    }
}

// The kernel has shaken hands with who waits in its queue: to them the service was there.
void HttpServer::Impl::accept_what_waits() {
    error_code error;
    acceptor_.non_blocking(true, error);
    while (!error) {
        tcp::socket socket(asio::make_strand(context_));
        acceptor_.accept(socket, error);
        if (!error) {
            accepted(std::move(socket));
        }
    }
}

void HttpServer::Impl::forget(const Connection* connection) {
    const std::lock_guard lock(mutex_);
    connections_.erase(connection);
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
            // No memory, most likely; the connection that it happened to ends by its timer.
            log_.write(Level::error, "a connection failed", {{"reason", error.what()}});
        }
    }
}

bool HttpServer::Impl::run() {
    asio::post(strand_, [this] { accept(); });
    auto guard = asio::make_work_guard(context_);
    std::vector<std::thread> threads;
    for (int i = 0; i < options_.threads; ++i) {
        threads.emplace_back([this] { work(); });
    }
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return stopping_; });
    lock.unlock();

    service_.leave();
    log_.write(Level::info, "stops");
    std::this_thread::sleep_for(options_.drain_delay);
    draining_ = true;
    asio::post(strand_, [this] {
        accept_what_waits();
        error_code ignored;
        acceptor_.close(ignored);
        pause_.cancel();
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
        log_.write(Level::error, "connections were cut, as --stop-timeout was over", {{"count", std::to_string(left)}});
        for (const auto& connection : connections()) {
            connection->cut();
        }
    }
    guard.reset();
    context_.stop();
    for (auto& thread : threads) {
        thread.join();
    }
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
    return impl_->url();
}

bool HttpServer::run() {
    return impl_->run();
}

void HttpServer::stop() {
    impl_->stop();
}

}  // namespace trtdet::serve
