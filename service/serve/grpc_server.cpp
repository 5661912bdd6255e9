#include "grpc_server.hpp"

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/util/json_util.h>
#include <grpc/support/log.h>
#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/proto_utils.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/ip/tcp.hpp>
#include <cstdlib>
#include <exception>
#include <functional>
#include <future>
#include <limits>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "clients.hpp"
#include "encoding.hpp"
#include "grpc_arrivals.hpp"
#include "grpc_departures.hpp"
#include "grpc_listener.hpp"
#include "grpc_message.hpp"
#include "grpc_traffic.hpp"
#include "inference_request.hpp"
#include "memory_budget.hpp"
#include "open_inference.pb.h"
#include "trtdet/errors.hpp"

// gRPC's own door to what a buffer holds beside its bytes.
class grpc::internal::GrpcByteBufferPeer {
public:
    // How they are compressed.
    static grpc_compression_algorithm packing(grpc::ByteBuffer& buffer) {
        return buffer.c_buffer()->data.raw.compression;
    }
};

namespace trtdet::serve {
namespace {

// Of the server that is there; gRPC's own log has no place for more.
std::atomic<Log*> log_of_library{nullptr};

// What gRPC itself says goes into the service's log, where each line has the same form.
void note(gpr_log_func_args* said) {
    if (Log* const log = log_of_library) {
        log->write(Level::debug, said->message, {{"from", "gRPC"}});
    }
}

// What HTTP answers, as gRPC has it.
grpc::Status status_of(const Response& response) {
    const auto code = [&] {
        switch (response.status) {
            case 400:
            case 415:
                return grpc::StatusCode::INVALID_ARGUMENT;
            case 403:
                return grpc::StatusCode::PERMISSION_DENIED;
            case 404:
                return grpc::StatusCode::NOT_FOUND;
            case 413:
            case 429:
                return grpc::StatusCode::RESOURCE_EXHAUSTED;
            case 503:
                return grpc::StatusCode::UNAVAILABLE;
            case 504:
                return grpc::StatusCode::DEADLINE_EXCEEDED;
            default:
                return grpc::StatusCode::INTERNAL;
        }
    }();
    return {code, response.message};
}

template <typename Message>
void write_message(const Message& message, grpc::ByteBuffer& buffer) {
    bool own = false;
    const auto status = grpc::SerializationTraits<Message>::Serialize(message, &buffer, &own);
    if (!status.ok()) {
        throw Error("the answer cannot be written: " + status.error_message());
    }
}

// gRPC's "ipv4:192.0.2.1:1234" or "ipv6:%5B2001:db8::1%5D:1234".
boost::asio::ip::tcp::endpoint endpoint_of(const std::string& peer) {
    const auto colon = peer.rfind(':');
    auto text = peer.substr(0, colon);
    text = text.substr(text.find(':') + 1);
    for (const std::string bracket : {"%5B", "%5D", "[", "]"}) {
        if (const auto at = text.find(bracket); at != std::string::npos) {
            text.erase(at, bracket.size());
        }
    }
    boost::system::error_code ignored;
    const auto port = colon == std::string::npos ? 0 : std::strtoul(peer.c_str() + colon + 1, nullptr, 10);
    return {boost::asio::ip::make_address(text, ignored), static_cast<std::uint16_t>(port)};
}

// Calls of each connection that gRPC is not done with. A client must keep to the number of streams that it is told, but
// gRPC lets it begin as many as it likes until it has confirmed that number. Any thread may call any member at any
// time.
class OpenCalls {
public:
    static constexpr std::size_t most = 300;  // a few times the streams, as some of them are about to end

    // Of this connection from now until what is returned is gone. count: gets how many it has.
    std::shared_ptr<void> add(const std::string& peer, std::size_t& count) {
        const std::lock_guard lock(all_->mutex);
        count = ++all_->by_peer[peer];
        // What works on a call may hold it for longer than this is there.
        return {nullptr, [all = all_, peer](void*) {
                    const std::lock_guard ending(all->mutex);
                    const auto found = all->by_peer.find(peer);
                    if (--found->second == 0) {
                        all->by_peer.erase(found);
                    }
                }};
    }

private:
    struct All {
        std::mutex mutex;
        std::unordered_map<std::string, std::size_t> by_peer;
    };

    const std::shared_ptr<All> all_ = std::make_shared<All>();
};

// What a page answers to a message.
using Page = std::function<grpc::Status(google::protobuf::io::ZeroCopyInputStream& given, grpc::ByteBuffer& answer)>;

// A call from its head to its answer; it deletes itself when gRPC is done with it. page: what answers it, empty for an
// inference.
class Call : public grpc::ServerGenericBidiReactor,
             public Arrival,
             public Departure,
             public std::enable_shared_from_this<Call> {
public:
    // What all calls share.
    struct Around {
        Service& service;
        Arrivals& arrivals;
        Departures& departures;
        Log& log;
    };

    Call(
        const Around& around, grpc::GenericCallbackServerContext& context, std::shared_ptr<Client> client,
        std::string peer, Page page, std::shared_ptr<void> counted, std::shared_ptr<Traffic> traffic)
        : service_(around.service),
          arrivals_(around.arrivals),
          departures_(around.departures),
          log_(around.log),
          context_(context),
          page_(std::move(page)),
          counted_(std::move(counted)),
          traffic_(std::move(traffic)) {
        traffic_->begin();
        head_.client = std::move(client);
        head_.peer = std::move(peer);
        head_.request_id = request_id("");
        held_ = service_.body_of(head_);
    }

    // Returns whether it is refused because of what its client has already.
    bool start() try {
        self_ = shared_from_this();
        if (arrivals_.add(self_)) {
            return false;
        }
        end(status_of(client_response(
            "you have the " + std::to_string(arrivals_.most_of_client()) +
            " calls that one client may have whose message is not there (--max-bodies-mb, --max-client-percent); "
            "try again later")));
        return true;
    } catch (const MemoryLimitError& error) {
        end(status_of(error.response()));
        return error.of() == MemoryLimitError::Of::client;
    }

    void refuse(const grpc::Status& status) {
        self_ = shared_from_this();
        end(status);
    }

    // A call that is over takes no reads any more.
    void read() override {
        const std::lock_guard lock(ending_);
        if (!over_) {
            traffic_->ask(arrivals_.largest());
            StartRead(&bytes_);
        }
    }

    // Once; what comes later is of no use.
    void end(const grpc::Status& status) override {
        const auto held = shared_from_this();
        const std::lock_guard lock(ending_);
        if (!over_.exchange(true)) {
            Finish(status);
        }
    }

    MemoryBudget::Share& held() const override { return *held_; }
    std::uint64_t client() const override { return head_.client->number; }

    void OnReadDone(bool whole) override {
        arrivals_.remove(*this);
        if (!whole) {
            traffic_->gone(arrivals_.largest());
            return end({grpc::StatusCode::INVALID_ARGUMENT, "the call ended before its message"});
        }
        traffic_->arrived(arrivals_.largest(), bytes_.Length());
        arrived_ = Clock::now();
        try {
            // What reading it takes stays: others may take the rest meanwhile.
            constexpr std::uint64_t beside = 512;
            held_->set(std::min(held_->bytes(), message_memory(bytes_.Length(), beside)));
            worked_on_ = true;
            // What takes a while is not for the threads that all clients share.
            service_.post(head_, [self = shared_from_this()] { self->work(); });
        } catch (const std::exception& error) {
            failed(error);
        }
    }

    void OnCancel() override {
        *abandoned_ = true;
        arrivals_.remove(*this);
        // What is worked on ends with its answer, so that a stop knows what hangs.
        if (!worked_on_) {
            end(grpc::Status::CANCELLED);
        }
    }

    // gRPC is not asked for anything once it is done.
    void cut() override {
        const auto held = shared_from_this();
        const std::lock_guard lock(ending_);
        if (!done_) {
            context_.TryCancel();
        }
    }

    void OnDone() override {
        departures_.remove(*this);
        std::shared_ptr<Call> last;  // this, until the lock is gone
        const std::lock_guard lock(ending_);
        done_ = true;
        last = std::move(self_);
    }

private:
    void work() noexcept try {
        if (*abandoned_) {
            return end(grpc::Status::CANCELLED);
        }
        if (grpc::internal::GrpcByteBufferPeer::packing(bytes_) != GRPC_COMPRESS_NONE) {
            unpack();
            google::protobuf::io::ArrayInputStream given(unpacked_.data(), static_cast<int>(unpacked_.size()));
            google::protobuf::io::ArrayInputStream again(unpacked_.data(), static_cast<int>(unpacked_.size()));
            return work_on(given, again, unpacked_.size());
        }
        auto bytes = bytes_;  // the same ones, as a reader wants a buffer that may change
        grpc::ProtoBufferReader given(&bytes);
        grpc::ProtoBufferReader again(&bytes_);
        work_on(given, again, bytes_.Length());
    } catch (const InferenceError& error) {
        finish(error_response(400, "bad-inference", error.what()));
    } catch (const EncodingError& error) {
        finish(error_response(400, "bad-encoding", error.what()));
    } catch (const BodyTooLargeError& error) {
        finish(error_response(413, "body-too-large", error.what()));
    } catch (const MemoryLimitError& error) {
        finish(error.response());
    } catch (const std::exception& error) {
        failed(error);
    }

    // given, again: the message, twice, as an inference is counted before it is read.
    void work_on(
        google::protobuf::io::ZeroCopyInputStream& given, google::protobuf::io::ZeroCopyInputStream& again,
        std::uint64_t length) {
        if (!page_) {
            return infer(given, again, length);
        }
        if (length > max_beside_tensors) {
            return end(
                {grpc::StatusCode::INVALID_ARGUMENT, "the message has " + std::to_string(length) +
                                                         " bytes, allowed are " + std::to_string(max_beside_tensors)});
        }
        grpc::ByteBuffer answer;
        const auto status = page_(given, answer);
        status.ok() ? answered(std::move(answer)) : end(status);
    }

    void infer(
        google::protobuf::io::ZeroCopyInputStream& given, google::protobuf::io::ZeroCopyInputStream& again,
        std::uint64_t length) {
        auto request = read(given, again, length);
        if (auto refusal = service_.refuse(head_)) {
            return finish(std::move(*refusal));
        }
        request.arrived = arrived_;
        request.abandoned = abandoned_;
        service_.handle(std::move(request), [self = shared_from_this()](const Answer& made) {
            Response response;
            try {
                response = made();
            } catch (const std::exception&) {
                response = busy_response("overloaded", "there is no memory for the request; try again later");
            }
            self->finish(std::move(response));
        });
    }

    void unpack() {
        std::vector<grpc::Slice> slices;
        std::string packed;
        held_->set(2 * bytes_.Length());
        if (!bytes_.Dump(&slices).ok()) {
            throw InferenceError("the message is damaged");
        }
        packed.reserve(bytes_.Length());
        for (const auto& slice : slices) {
            packed.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
        }
        const auto kind = grpc::internal::GrpcByteBufferPeer::packing(bytes_);
        const std::string encoding = kind == GRPC_COMPRESS_GZIP ? "gzip" : "deflate";
        const auto most = page_ ? max_beside_tensors : service_.options().max_body + Arrivals::window;
        unpacked_ = unpacked(packed, encoding, most, [&](std::uint64_t bytes) {
            if (*abandoned_) {
                throw EncodingError("the client has given up");
            }
            held_->set(2 * packed.size() + bytes);
        });
        slices.clear();
        bytes_.Clear();
        held_->set(unpacked_.size());
    }

    // What the message takes is charged before it is read.
    Request read(
        google::protobuf::io::ZeroCopyInputStream& given, google::protobuf::io::ZeroCopyInputStream& again,
        std::uint64_t length) {
        const auto beside = bytes_beside_tensors(given);
        if (beside > max_beside_tensors) {
            throw InferenceError(
                "the message has " + std::to_string(beside) + " bytes beside its tensors, allowed are " +
                std::to_string(max_beside_tensors));
        }
        held_->set(message_memory(length, beside));
        inference::ModelInferRequest message;
        if (!message.ParseFromZeroCopyStream(&again)) {
            throw InferenceError("the message is damaged");
        }
        bytes_.Clear();
        unpacked_ = {};
        auto known = infer_head(message);
        head_.method = std::move(known.method);
        head_.target = std::move(known.target);
        auto request = over_http(message, head_);
        head_ = request.head;
        held_->set(request.body.size());
        request.held = std::exchange(held_, nullptr);
        return request;
    }

    void finish(Response response) noexcept try {
        service_.answered(head_, response, Clock::now() - arrived_);
        if (!response.error.empty()) {
            return end(status_of(response));
        }
        grpc::ByteBuffer answer;
        write_message(from_http(response), answer);
        held_answer_ = response.held;
        answered(std::move(answer));
    } catch (const std::exception& error) {
        failed(error);
    }

    void answered(grpc::ByteBuffer answer) {
        const std::lock_guard lock(ending_);
        if (!over_.exchange(true)) {
            if (held_) {
                held_->set(0);
            }
            answer_ = std::move(answer);
            departures_.add(shared_from_this());
            StartWriteAndFinish(&answer_, {}, grpc::Status::OK);
        }
    }

    void failed(const std::exception& error) {
        log_.write(Level::error, "a call failed", error.what());
        end({grpc::StatusCode::INTERNAL, "the request failed; the reason is in the service's log"});
    }

    Service& service_;
    Arrivals& arrivals_;
    Departures& departures_;
    Log& log_;
    grpc::GenericCallbackServerContext& context_;
    const Page page_;
    const std::shared_ptr<void> counted_;  // among those of its connection
    const std::shared_ptr<Traffic> traffic_;
    const std::shared_ptr<std::atomic<bool>> abandoned_ = std::make_shared<std::atomic<bool>>(false);
    std::recursive_mutex ending_;  // gRPC may call back at once
    std::atomic<bool> over_{false};
    bool done_ = false;  // gRPC is
    std::atomic<bool> worked_on_{false};
    Clock::time_point arrived_ = Clock::now();
    Head head_;
    std::shared_ptr<MemoryBudget::Share> held_;  // of the message
    grpc::ByteBuffer bytes_;
    std::string unpacked_;
    grpc::ByteBuffer answer_;
    std::shared_ptr<void> held_answer_;
    std::shared_ptr<Call> self_;  // until gRPC is done
};

// Which calls there are, by their paths. They are taken as streams, whose messages gRPC does not read by itself.
class Protocol : public grpc::CallbackGenericService {
public:
    // cut: ends a connection. traffic: of one.
    Protocol(
        const Call::Around& around, std::function<void(const boost::asio::ip::tcp::endpoint& peer)> cut,
        std::function<std::shared_ptr<Traffic>(const boost::asio::ip::tcp::endpoint& peer)> traffic)
        : around_(around),
          service_(around.service),
          cut_(std::move(cut)),
          traffic_(std::move(traffic)),
          pages_(all_pages()) {}

    // Until then there are no models.
    void serve() { serves_ = true; }

    grpc::ServerGenericBidiReactor* CreateReactor(grpc::GenericCallbackServerContext* context) override {
        const auto peer = context->peer();
        const auto& method = context->method();
        const auto page = pages_.find(method);
        const bool is_inference = method == inference_path("ModelInfer");
        const auto endpoint = endpoint_of(peer);
        std::size_t count = 0;
        auto counted = open_.add(peer, count);
        const auto client = service_.clients().of(endpoint.address());
        const auto call = std::make_shared<Call>(
            around_, *context, client, peer, page == pages_.end() ? Page() : page->second, std::move(counted),
            traffic_(endpoint));
        const bool of_connection = count > OpenCalls::most;
        bool of_client = false;
        if (of_connection) {
            call->refuse(
                {grpc::StatusCode::RESOURCE_EXHAUSTED, "there are too many calls at a time on one connection"});
        } else if (method == inference_path("ModelStreamInfer")) {
            call->refuse({grpc::StatusCode::UNIMPLEMENTED, "there are no streams here; call ModelInfer"});
        } else if (page == pages_.end() && !is_inference) {
            call->refuse({grpc::StatusCode::UNIMPLEMENTED, "there is no method " + method + " here"});
        } else if (is_inference && !serves_) {
            call->refuse(status_of(starting()));
        } else {
            of_client = call->start();
        }
        if ((of_connection || of_client) && (client->refusals->add() || of_connection)) {
            cut_(endpoint);
        }
        return call.get();
    }

private:
    static std::string inference_path(const std::string& method) { return "/inference.GRPCInferenceService/" + method; }

    // What a method answers, as those of its messages' types do. make: given the request, fills in the response and
    // returns how the call ends.
    template <typename Given, typename Made, typename Make>
    static Page answers(Make make) {
        return [make](google::protobuf::io::ZeroCopyInputStream& given, grpc::ByteBuffer& answer) -> grpc::Status {
            Given request;
            if (!request.ParseFromZeroCopyStream(&given)) {
                return {grpc::StatusCode::INVALID_ARGUMENT, "the message is damaged"};
            }
            Made response;
            auto status = make(request, response);
            if (status.ok()) {
                write_message(response, answer);
            }
            return status;
        };
    }

    std::unordered_map<std::string, Page> all_pages() {
        std::unordered_map<std::string, Page> pages;
        add_health(pages);
        add_models(pages);
        add_repository(pages);
        return pages;
    }

    void add_health(std::unordered_map<std::string, Page>& pages) {
        pages[inference_path("ServerLive")] =
            answers<inference::ServerLiveRequest, inference::ServerLiveResponse>([this](const auto&, auto& response) {
                return yes_or_no("/v2/health/live", [&](bool yes) { response.set_live(yes); });
            });
        pages[inference_path("ServerReady")] =
            answers<inference::ServerReadyRequest, inference::ServerReadyResponse>([this](const auto&, auto& response) {
                return yes_or_no("/v2/health/ready", [&](bool yes) { response.set_ready(yes); });
            });
        pages[inference_path("ModelReady")] = answers<inference::ModelReadyRequest, inference::ModelReadyResponse>(
            [this](const auto& request, auto& response) {
                const auto path = model_path(request.name(), request.version()) + "/ready";
                return yes_or_no(path, [&](bool yes) { response.set_ready(yes); });
            });
        pages["/grpc.health.v1.Health/Check"] = answers<inference::HealthCheckRequest, inference::HealthCheckResponse>(
            [this](const auto& request, auto& response) -> grpc::Status {
                using Status = inference::HealthCheckResponse;
                if (!request.service().empty()) {
                    return {grpc::StatusCode::NOT_FOUND, "there is no such service; name none"};
                }
                return yes_or_no("/v2/health/ready", [&](bool yes) {
                    response.set_status(yes ? Status::SERVING : Status::NOT_SERVING);
                });
            });
    }

    void add_models(std::unordered_map<std::string, Page>& pages) {
        pages[inference_path("ServerMetadata")] =
            answers<inference::ServerMetadataRequest, inference::ServerMetadataResponse>(
                [this](const auto&, auto& response) { return page("GET", "/v2", response); });
        pages[inference_path("ModelMetadata")] =
            answers<inference::ModelMetadataRequest, inference::ModelMetadataResponse>(
                [this](const auto& request, auto& response) {
                    return page("GET", model_path(request.name(), request.version()), response);
                });
        pages[inference_path("ModelConfig")] = answers<inference::ModelConfigRequest, inference::ModelConfigResponse>(
            [this](const auto& request, auto& response) {
                const auto path = model_path(request.name(), request.version()) + "/config";
                return page("GET", path, *response.mutable_config());
            });
        pages[inference_path("ModelStatistics")] =
            answers<inference::ModelStatisticsRequest, inference::ModelStatisticsResponse>(
                [this](const auto& request, auto& response) {
                    const auto& name = request.name();
                    const auto model = name.empty() ? "/v2/models" : model_path(name, request.version());
                    return page("GET", model + "/stats", response);
                });
    }

    // The last two are refused: this is not the admin port.
    void add_repository(std::unordered_map<std::string, Page>& pages) {
        pages[inference_path("RepositoryIndex")] =
            answers<inference::RepositoryIndexRequest, inference::RepositoryIndexResponse>(
                [this](const auto&, auto& response) {
                    return page("POST", "/v2/repository/index", response, "models");
                });
        pages[inference_path("RepositoryModelLoad")] =
            answers<inference::RepositoryModelLoadRequest, inference::RepositoryModelLoadResponse>(
                [this](const auto& request, auto& response) {
                    return page("POST", change_path(request.model_name(), "load"), response);
                });
        pages[inference_path("RepositoryModelUnload")] =
            answers<inference::RepositoryModelUnloadRequest, inference::RepositoryModelUnloadResponse>(
                [this](const auto& request, auto& response) {
                    return page("POST", change_path(request.model_name(), "unload"), response);
                });
    }

    Response asked(std::string method, std::string path) {
        Request request;
        request.head.method = std::move(method);
        request.head.target = std::move(path);
        request.head.length = 0;
        request.arrived = Clock::now();
        if (!serves_) {
            return starting();
        }
        const auto head = request.head;
        auto refusal = service_.refuse(head);
        Response response;
        if (refusal) {
            response = std::move(*refusal);
        } else {
            // A page is answered at once.
            service_.handle(std::move(request), [&response](const Answer& made) { response = made(); });
        }
        service_.answered(head, response, {});
        return response;
    }

    static Response starting() { return busy_response("stopping", "the service is starting; try again later"); }

    // No is an answer, but not where there is no such model.
    template <typename Set>
    grpc::Status yes_or_no(const std::string& path, const Set& set) {
        const auto response = asked("GET", path);
        set(response.status == 200);
        return response.status == 404 ? status_of(response) : grpc::Status::OK;
    }

    // What the page of HTTP says, in the message of the same fields. list: the field that the whole of it becomes.
    grpc::Status page(
        const std::string& method, const std::string& path, google::protobuf::Message& message,
        const std::string& list = {}) {
        const auto response = asked(method, path);
        if (!response.error.empty()) {
            return status_of(response);
        }
        google::protobuf::util::JsonParseOptions options;
        options.ignore_unknown_fields = true;
        const auto body = list.empty() ? response.body : "{\"" + list + "\":" + response.body + "}";
        const auto parsed = google::protobuf::util::JsonStringToMessage(body, &message, options);
        return parsed.ok() ? grpc::Status::OK
                           : grpc::Status(grpc::StatusCode::INTERNAL, "the answer has no form in this protocol");
    }

    const Call::Around around_;
    serve::Service& service_;
    const std::function<void(const boost::asio::ip::tcp::endpoint& peer)> cut_;
    const std::function<std::shared_ptr<Traffic>(const boost::asio::ip::tcp::endpoint& peer)> traffic_;
    OpenCalls open_;
    const std::unordered_map<std::string, Page> pages_;
    std::atomic<bool> serves_{false};
};

}  // namespace

// What a message may have: one that takes more than the half of what its client may have would be refused, as it is
// there twice while it is read.
std::uint64_t largest_message(const ServiceOptions& options) {
    return std::min<std::uint64_t>(
        {options.max_body + Arrivals::window, part_of_limit(options.max_bodies, options.max_client_percent) / 2,
         std::numeric_limits<int>::max()});
}

ListenerOptions listener_options(const GrpcOptions& options, const ServiceOptions& service) {
    const auto most = static_cast<std::size_t>(options.max_connections);
    return {options.host, options.port, most, part_of_limit(most, service.max_client_percent)};
}

class GrpcServer::Impl {
public:
    Impl(const GrpcOptions& options, Service& service, Log& log)
        : options_(options),
          arrivals_(
              largest_message(service.options()),
              part_of_limit(service.options().max_bodies, service.options().max_client_percent) / 4,
              service.options().max_bodies / 8, options.body_timeout),
          departures_(options.write_timeout),
          protocol_(
              {service, arrivals_, departures_, log}, [this](const auto& peer) { listener_.cut(peer); },
              [this](const auto& peer) { return listener_.traffic(peer); }),
          listener_(listener_options(options, service.options()), service.clients(), [this](int socket) {
              grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters taken;
              taken.fd = socket;
              acceptor_->HandleNewConnection(&taken);
          }) {
        log_of_library = &log;
        gpr_set_log_function(note);
        grpc::ServerBuilder builder;
        acceptor_ = builder.experimental().AddExternalConnectionAcceptor(
            grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, grpc::InsecureServerCredentials());
        const auto milliseconds = [](std::chrono::milliseconds time) { return static_cast<int>(time.count()); };
        builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, milliseconds(options.header_timeout));
        builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, milliseconds(options.idle_timeout));
        builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, Refusals::calls);
        // Windows stay as large as what is charged for them, and messages compressed, as these are small.
        builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, static_cast<int>(Arrivals::window));
        builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
        // gRPC ends a connection with too many PINGs only after its last answer was written, and until then each
        // further one takes longer than the one before. They belong to no call and are bounded as such, see Traffic.
        builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
        builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
        builder.SetMaxReceiveMessageSize(static_cast<int>(largest_message(service.options())));
        builder.SetMaxSendMessageSize(-1);
        builder.RegisterCallbackGenericService(&protocol_);
        server_ = builder.BuildAndStart();
        if (!server_) {
            throw Error("gRPC does not start; leave out --grpc-port");
        }
        listener_.start();
    }

    ~Impl() { log_of_library = nullptr; }

    Impl(const Impl&) = delete;
    Impl& operator=(const Impl&) = delete;

    std::string address() const { return listener_.address(); }

    void serve() { protocol_.serve(); }

    bool stop() {
        if (stopped_) {
            return true;
        }
        stopped_ = true;
        listener_.stop();
        const auto done = std::make_shared<std::promise<void>>();
        auto finished = done->get_future();
        std::thread([server = server_.get(), done, patience = options_.stop_timeout] {
            server->Shutdown(std::chrono::system_clock::now() + patience);
            done->set_value();
        }).detach();
        // What is cut at the end of the timeout still has to say that it ends.
        return finished.wait_for(options_.stop_timeout + std::chrono::seconds(1)) == std::future_status::ready;
    }

private:
    const GrpcOptions options_;
    Arrivals arrivals_;
    Departures departures_;
    Protocol protocol_;
    std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
    GrpcListener listener_;
    std::unique_ptr<grpc::Server> server_;
    bool stopped_ = false;
};

GrpcServer::GrpcServer(const GrpcOptions& options, Service& service, Log& log)
    : impl_(std::make_unique<Impl>(options, service, log)) {}

GrpcServer::~GrpcServer() {
    stop();
}

std::string GrpcServer::address() const {
    return impl_->address();
}

void GrpcServer::serve() {
    impl_->serve();
}

bool GrpcServer::stop() {
    return impl_->stop();
}

}  // namespace trtdet::serve
