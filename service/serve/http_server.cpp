#include "http_server.hpp"

#include <sys/socket.h>

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/strand.hpp>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "connection.hpp"
#include "connections.hpp"
#include "threads.hpp"
#include "trtdet/errors.hpp"

namespace trtdet::serve {
namespace {

namespace asio = boost::asio;
using boost::asio::ip::tcp;
using boost::system::error_code;

// So many connections above the limit are told so; more are closed at once.
constexpr std::size_t max_refusals = 64;

// Connections to the port for probes, which are some machines' and no clients'.
constexpr std::size_t max_probes = 64;

// How long nothing is accepted after that has failed.
constexpr std::chrono::milliseconds accept_pause{100};

}  // namespace

class HttpServer::Impl {
public:
    Impl(HttpOptions wanted, Service& what, Log& where, Metrics& counts);

    void listen();
    std::string url(bool admin) const;
    bool run();
    void stop();

private:
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

    Serving serving_;
    std::deque<Port> ports_;  // the service's own first; they stay where they are

    std::mutex mutex_;
    std::condition_variable changed_;
    bool stopping_ = false;

    // After what connections use: it destroys those that are left.
    asio::io_context context_;
    asio::strand<asio::io_context::executor_type> strand_{asio::make_strand(context_)};  // of the acceptors
    std::deque<Listener> listeners_;                                                     // of each port
    std::optional<Threads> threads_;
};

HttpServer::Impl::Impl(HttpOptions wanted, Service& what, Log& where, Metrics& counts)
    : serving_(std::move(wanted), what, where, counts), context_(serving_.options.threads) {
    const auto most = static_cast<std::size_t>(serving_.options.max_connections);
    const auto of_client = part_of_limit(most, what.options().max_client_percent);
    ports_.push_back({serving_.options.port, most, static_cast<std::size_t>(of_client), false});
    if (serving_.options.admin_port) {
        ports_.push_back({*serving_.options.admin_port, max_probes, max_probes, true});
    }
    for (auto& port : ports_) {
        bind(listeners_.emplace_back(port, strand_));
    }
}

void HttpServer::Impl::check(const error_code& error, std::uint16_t port) const {
    if (error) {
        throw Error(
            "cannot listen on " + serving_.options.host + " port " + std::to_string(port) + ": " + error.message() +
            "; choose another with --host, --port and --admin-port");
    }
}

void HttpServer::Impl::bind(Listener& listener) {
    error_code error;
    tcp::resolver resolver(context_);
    const auto found = resolver.resolve(
        serving_.options.host, std::to_string(listener.port.number),
        tcp::resolver::passive | tcp::resolver::numeric_service, error);
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
    threads_.emplace(context_, serving_.options.threads, [this] { work(); });
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
                    serving_.log.write(Level::warning, "a connection could not be accepted", error.message().c_str());
                    serving_.connections.make_room(listener.port);
                } catch (const std::exception&) {
                    // No memory either: it is tried again all the same.
                }
                return accept_later(listener);
            }
            try {
                accepted(listener, std::move(socket));
            } catch (const std::exception& failure) {
                serving_.log.write(Level::error, "a connection could not be served", failure.what());
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
    const auto connection = make_connection(serving_, listener.port, std::move(socket));
    auto [refusal, connected] = serving_.connections.add(connection);
    if (!refusal) {
        connection->start();
    } else if (connected <= listener.port.most + max_refusals) {
        connection->start_refusing(std::move(*refusal));
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

void HttpServer::Impl::work() {
    while (true) {
        try {
            context_.run();
            return;
        } catch (const std::exception& error) {
            // Connections and acceptors see to themselves; what is left is what asio itself has no memory for.
            serving_.log.write(Level::error, "the server failed", error.what());
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

    serving_.service.leave();
    serving_.log.write(Level::info, "stops");
    std::this_thread::sleep_for(serving_.options.drain_delay);
    serving_.draining = true;
    asio::post(strand_, [this] {
        for (auto& listener : listeners_) {
            try {
                accept_what_waits(listener);
            } catch (const std::exception& error) {
                serving_.log.write(Level::error, "a connection could not be served", error.what());
            }
            error_code ignored;
            listener.acceptor.close(ignored);
            listener.pause.cancel();
        }
        for (const auto& connection : serving_.connections.all()) {
            connection->drain();
        }
        serving_.connections.close();
    });

    const bool finished = serving_.connections.wait_until_gone(serving_.options.stop_timeout);
    if (!finished) {
        const auto left = serving_.connections.all().size();
        serving_.log.write(Level::error, "connections were cut, as --stop-timeout was over", {{"count", left}});
        for (const auto& connection : serving_.connections.all()) {
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
