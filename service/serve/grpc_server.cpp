#include "grpc_server.hpp"

#include <google/protobuf/util/json_util.h>
#include <grpc/support/log.h>
#include <grpcpp/ext/health_check_service_server_builder_option.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/ip/address.hpp>
#include <exception>
#include <functional>
#include <future>
#include <limits>
#include <string_view>
#include <thread>
#include <utility>

#include "clients.hpp"
#include "grpc_message.hpp"
#include "inference_request.hpp"
#include "memory_budget.hpp"
#include "open_inference.grpc.pb.h"
#include "trtdet/errors.hpp"

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

// Whether the bytes are such a message.
bool read_message(grpc::ByteBuffer bytes, google::protobuf::Message& message) {
    grpc::ProtoBufferReader reader(&bytes);
    return reader.status().ok() && message.ParseFromZeroCopyStream(&reader);
}

template <typename Message>
void write_message(const Message& message, grpc::ByteBuffer& buffer) {
    bool own = false;
    const auto status = grpc::SerializationTraits<Message>::Serialize(message, &buffer, &own);
    if (!status.ok()) {
        throw Error("the answer cannot be written: " + status.error_message());
    }
}

// An inference from its message to its answer; it deletes itself when gRPC is done with it.
class Call : public grpc::ServerUnaryReactor {
public:
    Call(Service& service, Log& log, std::shared_ptr<Client> client, std::string peer) : service_(service), log_(log) {
        head_.client = std::move(client);
        head_.peer = std::move(peer);
        head_.request_id = request_id("");
    }

    void start(const grpc::ByteBuffer& given, grpc::ByteBuffer& answer) try {
        auto request = read(given);
        if (auto refusal = service_.refuse(head_)) {
            return finish(std::move(*refusal), answer);
        }
        request.arrived = arrived_;
        request.abandoned = abandoned_;
        service_.handle(std::move(request), [this, &answer](const Answer& made) {
            Response response;
            try {
                response = made();
            } catch (const std::exception&) {
                response = busy_response("overloaded", "there is no memory for the request; try again later");
            }
            finish(std::move(response), answer);
        });
    } catch (const InferenceError& error) {
        finish(error_response(400, "bad-inference", error.what()), answer);
    } catch (const MemoryLimitError& error) {
        finish(error.response(), answer);
    } catch (const std::exception& error) {
        failed(error);
    }

    void OnCancel() override { *abandoned_ = true; }
    void OnDone() override { delete this; }

private:
    // What the message takes is charged before it is read.
    Request read(const grpc::ByteBuffer& given) {
        auto bytes = given;  // the same ones, as a reader wants a buffer that may change
        grpc::ProtoBufferReader reader(&bytes);
        const auto beside = bytes_beside_tensors(reader);
        if (beside > max_beside_tensors) {
            throw InferenceError(
                "the message has " + std::to_string(beside) + " bytes beside its tensors, allowed are " +
                std::to_string(max_beside_tensors));
        }
        const auto held = service_.body_of(head_);
        held->set(message_memory(given.Length(), beside));
        inference::ModelInferRequest message;
        if (!read_message(given, message)) {
            throw InferenceError("the message is damaged");
        }
        auto known = infer_head(message);
        head_.method = std::move(known.method);
        head_.target = std::move(known.target);
        auto request = over_http(message, head_);
        head_ = request.head;
        held->set(request.body.size());
        request.held = held;
        return request;
    }

    void finish(Response response, grpc::ByteBuffer& answer) try {
        service_.answered(head_, response, Clock::now() - arrived_);
        if (!response.error.empty()) {
            return Finish(status_of(response));
        }
        write_message(from_http(response), answer);
        Finish(grpc::Status::OK);
    } catch (const std::exception& error) {
        failed(error);
    }

    void failed(const std::exception& error) {
        log_.write(Level::error, "a call failed", error.what());
        Finish({grpc::StatusCode::INTERNAL, "the request failed; the reason is in the service's log"});
    }

    Service& service_;
    Log& log_;
    const std::shared_ptr<std::atomic<bool>> abandoned_ = std::make_shared<std::atomic<bool>>(false);
    const Clock::time_point arrived_ = Clock::now();
    Head head_;
};

// Streams are told at once that there are none.
class NoStream : public grpc::ServerBidiReactor<inference::ModelInferRequest, inference::ModelStreamInferResponse> {
public:
    NoStream() { Finish({grpc::StatusCode::UNIMPLEMENTED, "there are no streams here; call ModelInfer"}); }
    void OnDone() override { delete this; }
};

// gRPC's "ipv4:192.0.2.1:1234" or "ipv6:%5B2001:db8::1%5D:1234".
boost::asio::ip::address address_of(const std::string& peer) {
    auto text = peer.substr(peer.find(':') + 1);
    text = text.substr(0, text.rfind(':'));
    for (const std::string bracket : {"%5B", "%5D", "[", "]"}) {
        if (const auto at = text.find(bracket); at != std::string::npos) {
            text.erase(at, bracket.size());
        }
    }
    boost::system::error_code ignored;
    return boost::asio::ip::make_address(text, ignored);
}

// All calls but streams, with their messages as they arrive: what a message becomes in memory may be a hundred times as
// much, so that its size is looked at before it is read.
// clang-format off
template <typename Base> using Raw =
    inference::GRPCInferenceService::WithRawCallbackMethod_ServerLive<
    inference::GRPCInferenceService::WithRawCallbackMethod_ServerReady<
    inference::GRPCInferenceService::WithRawCallbackMethod_ModelReady<
    inference::GRPCInferenceService::WithRawCallbackMethod_ServerMetadata<
    inference::GRPCInferenceService::WithRawCallbackMethod_ModelMetadata<
    inference::GRPCInferenceService::WithRawCallbackMethod_ModelInfer<
    inference::GRPCInferenceService::WithRawCallbackMethod_ModelConfig<
    inference::GRPCInferenceService::WithRawCallbackMethod_ModelStatistics<
    inference::GRPCInferenceService::WithRawCallbackMethod_RepositoryIndex<
    inference::GRPCInferenceService::WithRawCallbackMethod_RepositoryModelLoad<
    inference::GRPCInferenceService::WithRawCallbackMethod_RepositoryModelUnload<Base>>>>>>>>>>>;
// clang-format on
using Calls =
    Raw<inference::GRPCInferenceService::WithCallbackMethod_ModelStreamInfer<inference::GRPCInferenceService::Service>>;

class Protocol : public Calls {
    using Context = grpc::CallbackServerContext;
    using Reactor = grpc::ServerUnaryReactor;
    using Bytes = grpc::ByteBuffer;

public:
    Protocol(serve::Service& service, Log& log) : service_(service), log_(log) {}

    // Until then there are no models.
    void serve() { serves_ = true; }

    Reactor* ServerLive(Context* context, const Bytes* given, Bytes* answer) override {
        return call<inference::ServerLiveRequest, inference::ServerLiveResponse>(
            context, *given, *answer, [this](const auto& /*request*/, auto& response) {
                return yes_or_no("/v2/health/live", [&](bool yes) { response.set_live(yes); });
            });
    }

    Reactor* ServerReady(Context* context, const Bytes* given, Bytes* answer) override {
        return call<inference::ServerReadyRequest, inference::ServerReadyResponse>(
            context, *given, *answer, [this](const auto& /*request*/, auto& response) {
                return yes_or_no("/v2/health/ready", [&](bool yes) { response.set_ready(yes); });
            });
    }

    Reactor* ModelReady(Context* context, const Bytes* given, Bytes* answer) override {
        return call<inference::ModelReadyRequest, inference::ModelReadyResponse>(
            context, *given, *answer, [this](const auto& request, auto& response) {
                const auto path = model_path(request.name(), request.version()) + "/ready";
                return yes_or_no(path, [&](bool yes) { response.set_ready(yes); });
            });
    }

    Reactor* ServerMetadata(Context* context, const Bytes* given, Bytes* answer) override {
        return call<inference::ServerMetadataRequest, inference::ServerMetadataResponse>(
            context, *given, *answer,
            [this](const auto& /*request*/, auto& response) { return page("GET", "/v2", response); });
    }

    Reactor* ModelMetadata(Context* context, const Bytes* given, Bytes* answer) override {
        return call<inference::ModelMetadataRequest, inference::ModelMetadataResponse>(
            context, *given, *answer, [this](const auto& request, auto& response) {
                return page("GET", model_path(request.name(), request.version()), response);
            });
    }

    Reactor* ModelConfig(Context* context, const Bytes* given, Bytes* answer) override {
        return call<inference::ModelConfigRequest, inference::ModelConfigResponse>(
            context, *given, *answer, [this](const auto& request, auto& response) {
                const auto path = model_path(request.name(), request.version()) + "/config";
                return page("GET", path, *response.mutable_config());
            });
    }

    Reactor* ModelStatistics(Context* context, const Bytes* given, Bytes* answer) override {
        return call<inference::ModelStatisticsRequest, inference::ModelStatisticsResponse>(
            context, *given, *answer, [this](const auto& request, auto& response) {
                const auto& name = request.name();
                const auto model = name.empty() ? "/v2/models" : model_path(name, request.version());
                return page("GET", model + "/stats", response);
            });
    }

    Reactor* RepositoryIndex(Context* context, const Bytes* given, Bytes* answer) override {
        return call<inference::RepositoryIndexRequest, inference::RepositoryIndexResponse>(
            context, *given, *answer, [this](const auto& /*request*/, auto& response) {
                return page("POST", "/v2/repository/index", response, "models");
            });
    }

    // Both are refused: this is not the admin port.
    Reactor* RepositoryModelLoad(Context* context, const Bytes* given, Bytes* answer) override {
        return call<inference::RepositoryModelLoadRequest, inference::RepositoryModelLoadResponse>(
            context, *given, *answer, [this](const auto& request, auto& response) {
                return page("POST", change_path(request.model_name(), "load"), response);
            });
    }

    Reactor* RepositoryModelUnload(Context* context, const Bytes* given, Bytes* answer) override {
        return call<inference::RepositoryModelUnloadRequest, inference::RepositoryModelUnloadResponse>(
            context, *given, *answer, [this](const auto& request, auto& response) {
                return page("POST", change_path(request.model_name(), "unload"), response);
            });
    }

    Reactor* ModelInfer(Context* context, const Bytes* given, Bytes* answer) override {
        const auto peer = context->peer();
        auto* const call = new Call(service_, log_, service_.clients().of(address_of(peer)), peer);
        if (serves_) {
            call->start(*given, *answer);
        } else {
            call->Finish(status_of(starting()));
        }
        return call;
    }

    grpc::ServerBidiReactor<inference::ModelInferRequest, inference::ModelStreamInferResponse>* ModelStreamInfer(
        Context* /*context*/) override {
        return new NoStream;
    }

private:
    // make: given the request, fills in the response and returns how the call ends.
    template <typename Given, typename Made, typename Make>
    Reactor* call(Context* context, const Bytes& given, Bytes& answer, const Make& make) {
        auto* const reactor = context->DefaultReactor();
        reactor->Finish([&]() -> grpc::Status {
            try {
                if (given.Length() > max_beside_tensors) {
                    return {
                        grpc::StatusCode::INVALID_ARGUMENT, "the message has " + std::to_string(given.Length()) +
                                                                " bytes, allowed are " +
                                                                std::to_string(max_beside_tensors)};
                }
                Given request;
                if (!read_message(given, request)) {
                    return {grpc::StatusCode::INVALID_ARGUMENT, "the message is damaged"};
                }
                Made response;
                const auto status = make(request, response);
                if (status.ok()) {
                    write_message(response, answer);
                }
                return status;
            } catch (const std::exception& error) {
                log_.write(Level::error, "a call failed", error.what());
                return {grpc::StatusCode::INTERNAL, "the request failed; the reason is in the service's log"};
            }
        }());
        return reactor;
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

    serve::Service& service_;
    Log& log_;
    std::atomic<bool> serves_{false};
};

}  // namespace

class GrpcServer::Impl {
public:
    Impl(const GrpcOptions& options, Service& service, Log& log) : options_(options), protocol_(service, log) {
        log_of_library = &log;
        gpr_set_log_function(note);
        grpc::EnableDefaultHealthCheckService(true);
        grpc::ServerBuilder builder;
        int port = 0;
        const bool v6 = options.host.find(':') != std::string::npos;
        const auto host = v6 ? "[" + options.host + "]" : options.host;
        builder.AddListeningPort(host + ":" + std::to_string(options.port), grpc::InsecureServerCredentials(), &port);
        builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
        builder.SetMaxReceiveMessageSize(static_cast<int>(
            std::min<std::uint64_t>(service.options().max_body + 65'536, std::numeric_limits<int>::max())));
        builder.SetMaxSendMessageSize(-1);
        // Of messages that arrive, before they are charged to their clients.
        grpc::ResourceQuota quota("trtdet-serve");
        quota.Resize(service.options().max_bodies);
        builder.SetResourceQuota(quota);
        builder.RegisterService(&protocol_);
        server_ = builder.BuildAndStart();
        if (!server_ || port == 0) {
            throw Error(
                "cannot listen on " + options.host + " port " + std::to_string(options.port) +
                " for gRPC; choose another with --host and --grpc-port");
        }
        address_ = host + ":" + std::to_string(port);
    }

    ~Impl() { log_of_library = nullptr; }

    Impl(const Impl&) = delete;
    Impl& operator=(const Impl&) = delete;

    std::string address() const { return address_; }

    void serve() { protocol_.serve(); }

    bool stop() {
        if (stopped_) {
            return true;
        }
        stopped_ = true;
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
    Protocol protocol_;
    std::unique_ptr<grpc::Server> server_;
    std::string address_;
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
