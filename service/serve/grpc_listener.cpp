#include "grpc_listener.hpp"

#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "trtdet/errors.hpp"

namespace trtdet::serve {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;

bool GrpcListener::Open::closed() const {
    struct stat found {};
    return ::fstat(socket, &found) != 0 || found.st_dev != device || found.st_ino != file;
}

void GrpcListener::Open::cut() const {
    if (closed()) {
        return;
    }
    // Linux resets the connection and drops all that was received. After shutdown() it would be read to its end, which
    // does not come where the client goes on sending.
    sockaddr none{};
    none.sa_family = AF_UNSPEC;
    if (::connect(socket, &none, sizeof(none)) != 0) {
        ::shutdown(socket, SHUT_RDWR);
    }
}

GrpcListener::GrpcListener(ListenerOptions options, Clients& clients, std::function<void(int)> take)
    : options_(std::move(options)), clients_(clients), take_(std::move(take)) {
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
    acceptor_.listen(asio::socket_base::max_listen_connections, error);
    check(error);
}

GrpcListener::~GrpcListener() {
    stop();
}

void GrpcListener::check(const error_code& error) const {
    if (error) {
        throw Error(
            "cannot listen on " + options_.host + " port " + std::to_string(options_.port) +
            " for gRPC: " + error.message() + "; choose another with --host and --grpc-port");
    }
}

std::string GrpcListener::address() const {
    const auto endpoint = acceptor_.local_endpoint();
    const auto host = endpoint.address().to_string();
    return (endpoint.address().is_v6() ? "[" + host + "]" : host) + ":" + std::to_string(endpoint.port());
}

void GrpcListener::start() {
    thread_ = std::thread([this] {
        while (!stopped_) {
            accept();
        }
    });
    watching_ = std::thread([this] { watch(); });
}

void GrpcListener::stop() {
    if (stopped_.exchange(true) || !thread_.joinable()) {
        return;
    }
    // Wakes the thread that waits for the next one.
    ::shutdown(acceptor_.native_handle(), SHUT_RDWR);
    thread_.join();
    watched_ = false;
    watching_.join();
}

void GrpcListener::accept() {
    error_code error;
    tcp::socket socket(context_);
    tcp::endpoint peer;
    acceptor_.accept(socket, peer, error);
    if (stopped_) {
        return;
    }
    if (error) {
        // As where there are no descriptors left: some will be closed.
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        return;
    }
    // As gRPC names it, where both kinds of addresses come to one socket.
    if (const auto& address = peer.address(); address.is_v6() && address.to_v6().is_v4_mapped()) {
        peer.address(asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6()));
    }
    auto client = clients_.of(peer.address());
    if (!client->refusals->may_connect()) {
        return;
    }
    std::unique_lock lock(mutex_);
    if (!admit(client)) {
        return;
    }
    socket.set_option(tcp::no_delay(true), error);
    socket.native_non_blocking(true, error);
    struct stat file {};
    const int number = error ? -1 : socket.release(error);
    if (error || ::fstat(number, &file) != 0) {
        return;
    }
    ++by_client_[client.get()];
    const auto traffic = std::make_shared<Traffic>(number);
    traffic_[peer] = traffic;
    open_.push_back({number, file.st_dev, file.st_ino, peer, std::move(client), traffic});
    // gRPC may read in here for as long as the client sends, until it is cut.
    lock.unlock();
    take_(number);
}

// Whether there is room for one more.
bool GrpcListener::admit(const std::shared_ptr<Client>& client) {
    const auto of = [this](const Client* whose) {
        const auto found = by_client_.find(whose);
        return found == by_client_.end() ? 0 : found->second;
    };
    if (open_.size() >= options_.most || of(client.get()) >= options_.most_of_client) {
        forget_closed();
    }
    if (of(client.get()) >= options_.most_of_client) {
        return false;
    }
    if (open_.size() < options_.most) {
        return true;
    }
    const auto most = std::max_element(open_.begin(), open_.end(), [&](const Open& a, const Open& b) {
        return of(a.client.get()) < of(b.client.get());
    });
    if (of(most->client.get()) <= of(client.get()) + 1) {
        return false;
    }
    most->cut();
    forget(most);
    return true;
}

void GrpcListener::cut(const tcp::endpoint& peer) {
    const std::lock_guard lock(mutex_);
    const auto found =
        std::find_if(open_.begin(), open_.end(), [&](const Open& one) { return one.peer == peer && !one.closed(); });
    if (found != open_.end()) {
        found->cut();
        forget(found);
    }
}

std::shared_ptr<Traffic> GrpcListener::traffic(const tcp::endpoint& peer) {
    const std::lock_guard lock(mutex_);
    const auto found = traffic_.find(peer);
    if (found != traffic_.end()) {
        known_ = true;
        return found->second;
    }
    // Of a connection that was ended. Where it is so of all, nobody is to be blamed for what cannot be counted.
    unknown_ = true;
    return std::make_shared<Traffic>(-1);
}

void GrpcListener::watch() {
    while (watched_) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        cut_floods();
    }
}

void GrpcListener::cut_floods() {
    const std::lock_guard lock(mutex_);
    if (unknown_ && !known_) {
        return;
    }
    std::vector<std::pair<std::uint64_t, std::list<Open>::iterator>> floods;
    std::unordered_map<const Client*, std::uint64_t> of_client;
    std::uint64_t of_all = 0;
    for (auto one = open_.begin(); one != open_.end(); ++one) {
        const auto beside = one->traffic->beside();
        if (beside > 0 && !one->closed()) {
            floods.emplace_back(beside, one);
            of_client[one->client.get()] += beside;
            of_all += beside;
        }
    }
    std::sort(floods.begin(), floods.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    for (const auto& [beside, one] : floods) {
        auto& of_this = of_client[one->client.get()];
        if (of_this > most_beside_of_client || of_all > most_beside) {
            of_this -= beside;
            of_all -= beside;
            one->client->refusals->add_flood();
            one->cut();
            forget(one);
        }
    }
}

void GrpcListener::forget_closed() {
    // It looks at each of them, and whoever connects again and again should not make it do nothing else.
    const auto now = std::chrono::steady_clock::now();
    if (now - looked_ < std::chrono::milliseconds(20)) {
        return;
    }
    looked_ = now;
    for (auto one = open_.begin(); one != open_.end();) {
        const auto next = std::next(one);
        if (one->closed()) {
            forget(one);
        }
        one = next;
    }
}

void GrpcListener::forget(std::list<Open>::iterator one) {
    const auto count = by_client_.find(one->client.get());
    if (--count->second == 0) {
        by_client_.erase(count);
    }
    // The same address may be another connection's by now.
    if (const auto own = traffic_.find(one->peer); own != traffic_.end() && own->second == one->traffic) {
        traffic_.erase(own);
    }
    open_.erase(one);
}

}  // namespace trtdet::serve
