#include "grpc_server.hpp"

#include <google/protobuf/util/json_util.h>
#include <grpc/support/log.h>
#include <grpcpp/ext/health_check_service_server_builder_option.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/ip/address.hpp>
#include <boost/url/encode.hpp>
#include <boost/url/rfc/unreserved_chars.hpp>
#include <exception>
#include <functional>
#include <future>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <thread>
#include <utility>

#include "clients.hpp"
#include "memory_budget.hpp"
#include "open_inference.grpc.pb.h"
#include "trtdet/errors.hpp"

namespace trtdet::serve {
namespace {

using Json = nlohmann::ordered_json;

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

// A part of a path, with %XX for every byte that has a meaning in one.
std::string in_path(const std::string& text) {
    return boost::urls::encode(text, boost::urls::unreserved_chars);
}

std::string model_path(const std::string& name, const std::string& version) {
    return "/v2/models/" + in_path(name) + (version.empty() ? "" : "/versions/" + in_path(version));
}

Json parameter(const inference::InferParameter& given) {
    switch (given.parameter_choice_case()) {
        case inference::InferParameter::kBoolParam:
            return given.bool_param();
        case inference::InferParameter::kInt64Param:
            return given.int64_param();
        case inference::InferParameter::kUint64Param:
            return given.uint64_param();
        case inference::InferParameter::kDoubleParam:
            return given.double_param();
        case inference::InferParameter::kStringParam:
            return given.string_param();
        case inference::InferParameter::PARAMETER_CHOICE_NOT_SET:
            break;
    }
    return nullptr;
}

template <typename Parameters>
Json parameters(const Parameters& given) {
    Json all = Json::object();
    for (const auto& [name, value] : given) {
        all[name] = parameter(value);
    }
    return all;
}

// Bytes of an input as it stands behind the JSON over HTTP.
std::size_t tensor_bytes(const inference::ModelInferRequest& request, int index) {
    if (request.raw_input_contents_size() > index) {
        return request.raw_input_contents(index).size();
    }
    const auto& contents = request.inputs(index).contents();
    auto bytes = static_cast<std::size_t>(contents.fp32_contents_size()) * sizeof(float);
    for (const auto& element : contents.bytes_contents()) {
        bytes += sizeof(std::uint32_t) + element.size();
    }
    return bytes;
}

// Appends these bytes.
void append_tensor(std::string& bytes, const inference::ModelInferRequest& request, int index) {
    if (request.raw_input_contents_size() > index) {
        bytes += request.raw_input_contents(index);
        return;
    }
    const auto& contents = request.inputs(index).contents();
    bytes.append(
        reinterpret_cast<const char*>(contents.fp32_contents().data()),
        static_cast<std::size_t>(contents.fp32_contents_size()) * sizeof(float));
    for (const auto& element : contents.bytes_contents()) {
        const auto length = static_cast<std::uint32_t>(element.size());
        bytes.append(reinterpret_cast<const char*>(&length), sizeof length).append(element);
    }
}

// The request as it would have come over HTTP: JSON, and the tensors behind it.
Request over_http(const inference::ModelInferRequest& given) {
    Json json{{"id", given.id()}, {"parameters", parameters(given.parameters())}};
    json["parameters"]["binary_data_output"] = true;
    json["inputs"] = Json::array();
    std::size_t tensors = 0;
    for (int index = 0; index < given.inputs_size(); ++index) {
        const auto& input = given.inputs(index);
        Json own = parameters(input.parameters());
        own["binary_data_size"] = tensor_bytes(given, index);
        tensors += tensor_bytes(given, index);
        json["inputs"].push_back(
            {{"name", input.name()},
             {"datatype", input.datatype()},
             {"shape", std::vector<std::int64_t>(input.shape().begin(), input.shape().end())},
             {"parameters", std::move(own)}});
    }
    for (const auto& output : given.outputs()) {
        Json own = parameters(output.parameters());
        own["binary_data"] = true;
        json["outputs"].push_back({{"name", output.name()}, {"parameters", std::move(own)}});
    }
    Request request;
    request.body = json.dump(-1, ' ', false, Json::error_handler_t::replace);
    request.head.inference_header_length = std::to_string(request.body.size());
    // Once, as a batch of tensors is megabytes.
    request.body.reserve(request.body.size() + tensors);
    for (int index = 0; index < given.inputs_size(); ++index) {
        append_tensor(request.body, given, index);
    }
    request.head.method = "POST";
    request.head.target = model_path(given.model_name(), given.model_version()) + "/infer";
    request.head.length = request.body.size();
    return request;
}

// The other way round.
void from_http(const Response& response, inference::ModelInferResponse& answer) {
    std::size_t length = response.body.size();
    for (const auto& [name, value] : response.headers) {
        if (name == "Inference-Header-Content-Length") {
            length = std::stoul(value);
        }
    }
    const auto json = Json::parse(response.body.substr(0, length));
    answer.set_model_name(json["model_name"].get<std::string>());
    answer.set_model_version(json["model_version"].get<std::string>());
    answer.set_id(json.value("id", ""));
    for (const auto& [name, value] : json["parameters"].items()) {
        (*answer.mutable_parameters())[name].set_string_param(value.get<std::string>());
    }
    for (const auto& output : json["outputs"]) {
        auto& one = *answer.add_outputs();
        one.set_name(output["name"].get<std::string>());
        one.set_datatype(output["datatype"].get<std::string>());
        for (const auto& size : output["shape"]) {
            one.add_shape(size.get<std::int64_t>());
        }
        const auto bytes = output["parameters"]["binary_data_size"].get<std::size_t>();
        answer.add_raw_output_contents(response.body.substr(length, bytes));
        length += bytes;
    }
}

// An inference from its message to its answer; it deletes itself when gRPC is done with it.
class Call : public grpc::ServerUnaryReactor {
public:
    Call(Service& service, Log& log, std::shared_ptr<Client> client, std::string peer)
        : service_(service), log_(log), client_(std::move(client)), peer_(std::move(peer)) {}

    void start(const inference::ModelInferRequest& given, inference::ModelInferResponse& answer) try {
        auto request = over_http(given);
        request.head.client = client_;
        request.head.peer = peer_;
        request.head.request_id = request_id("");
        request.arrived = Clock::now();
        request.abandoned = abandoned_;
        head_ = request.head;
        arrived_ = request.arrived;
        if (auto refusal = service_.refuse(head_)) {
            return finish(std::move(*refusal), answer);
        }
        const auto held = service_.body_of(head_);
        held->set(request.body.size());
        request.held = held;
        service_.handle(std::move(request), [this, &answer](const Answer& made) {
            Response response;
            try {
                response = made();
            } catch (const std::exception&) {
                response = busy_response("overloaded", "there is no memory for the request; try again later");
            }
            finish(std::move(response), answer);
        });
    } catch (const MemoryLimitError& error) {
        finish(error.response(), answer);
    } catch (const std::exception& error) {
        failed(error);
    }

    void OnCancel() override { *abandoned_ = true; }
    void OnDone() override { delete this; }

private:
    void finish(Response response, inference::ModelInferResponse& answer) try {
        service_.answered(head_, response, Clock::now() - arrived_);
        if (!response.error.empty()) {
            return Finish(status_of(response));
        }
        from_http(response, answer);
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
    const std::shared_ptr<Client> client_;
    const std::string peer_;
    const std::shared_ptr<std::atomic<bool>> abandoned_ = std::make_shared<std::atomic<bool>>(false);
    Head head_;
    Clock::time_point arrived_;
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

class Protocol : public inference::GRPCInferenceService::CallbackService {
public:
    Protocol(serve::Service& service, Log& log) : service_(service), log_(log) {}

    // Until then there are no models.
    void serve() { serves_ = true; }

    grpc::ServerUnaryReactor* ServerLive(
        grpc::CallbackServerContext* context, const inference::ServerLiveRequest* /*request*/,
        inference::ServerLiveResponse* response) override {
        return yes_or_no(context, "/v2/health/live", [response](bool yes) { response->set_live(yes); });
    }

    grpc::ServerUnaryReactor* ServerReady(
        grpc::CallbackServerContext* context, const inference::ServerReadyRequest* /*request*/,
        inference::ServerReadyResponse* response) override {
        return yes_or_no(context, "/v2/health/ready", [response](bool yes) { response->set_ready(yes); });
    }

    grpc::ServerUnaryReactor* ModelReady(
        grpc::CallbackServerContext* context, const inference::ModelReadyRequest* request,
        inference::ModelReadyResponse* response) override {
        const auto path = model_path(request->name(), request->version()) + "/ready";
        return yes_or_no(context, path, [response](bool yes) { response->set_ready(yes); });
    }

    grpc::ServerUnaryReactor* ServerMetadata(
        grpc::CallbackServerContext* context, const inference::ServerMetadataRequest* /*request*/,
        inference::ServerMetadataResponse* response) override {
        return page(context, "GET", "/v2", *response);
    }

    grpc::ServerUnaryReactor* ModelMetadata(
        grpc::CallbackServerContext* context, const inference::ModelMetadataRequest* request,
        inference::ModelMetadataResponse* response) override {
        return page(context, "GET", model_path(request->name(), request->version()), *response);
    }

    grpc::ServerUnaryReactor* ModelConfig(
        grpc::CallbackServerContext* context, const inference::ModelConfigRequest* request,
        inference::ModelConfigResponse* response) override {
        const auto path = model_path(request->name(), request->version()) + "/config";
        return page(context, "GET", path, *response->mutable_config());
    }

    grpc::ServerUnaryReactor* ModelStatistics(
        grpc::CallbackServerContext* context, const inference::ModelStatisticsRequest* request,
        inference::ModelStatisticsResponse* response) override {
        const auto& name = request->name();
        return page(
            context, "GET", name.empty() ? "/v2/models/stats" : model_path(name, request->version()) + "/stats",
            *response);
    }

    grpc::ServerUnaryReactor* RepositoryIndex(
        grpc::CallbackServerContext* context, const inference::RepositoryIndexRequest* /*request*/,
        inference::RepositoryIndexResponse* response) override {
        return page(context, "POST", "/v2/repository/index", *response, "models");
    }

    // Both are refused: this is not the admin port.
    grpc::ServerUnaryReactor* RepositoryModelLoad(
        grpc::CallbackServerContext* context, const inference::RepositoryModelLoadRequest* request,
        inference::RepositoryModelLoadResponse* response) override {
        return page(context, "POST", change_path(request->model_name(), "load"), *response);
    }

    grpc::ServerUnaryReactor* RepositoryModelUnload(
        grpc::CallbackServerContext* context, const inference::RepositoryModelUnloadRequest* request,
        inference::RepositoryModelUnloadResponse* response) override {
        return page(context, "POST", change_path(request->model_name(), "unload"), *response);
    }

    grpc::ServerUnaryReactor* ModelInfer(
        grpc::CallbackServerContext* context, const inference::ModelInferRequest* request,
        inference::ModelInferResponse* response) override {
        const auto peer = context->peer();
        auto* const call = new Call(service_, log_, service_.clients().of(address_of(peer)), peer);
        if (serves_) {
            call->start(*request, *response);
        } else {
            call->Finish(status_of(starting()));
        }
        return call;
    }

    grpc::ServerBidiReactor<inference::ModelInferRequest, inference::ModelStreamInferResponse>* ModelStreamInfer(
        grpc::CallbackServerContext* /*context*/) override {
        return new NoStream;
    }

private:
    static std::string change_path(const std::string& model, const std::string& change) {
        return "/v2/repository/models/" + in_path(model) + "/" + change;
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
    grpc::ServerUnaryReactor* yes_or_no(grpc::CallbackServerContext* context, const std::string& path, const Set& set) {
        auto* const reactor = context->DefaultReactor();
        const auto response = asked("GET", path);
        set(response.status == 200);
        reactor->Finish(response.status == 404 ? status_of(response) : grpc::Status::OK);
        return reactor;
    }

    // What the page of HTTP says, in the message of the same fields. list: the field that the whole of it becomes.
    grpc::ServerUnaryReactor* page(
        grpc::CallbackServerContext* context, const std::string& method, const std::string& path,
        google::protobuf::Message& message, const std::string& list = {}) {
        auto* const reactor = context->DefaultReactor();
        const auto response = asked(method, path);
        if (!response.error.empty()) {
            reactor->Finish(status_of(response));
            return reactor;
        }
        google::protobuf::util::JsonParseOptions options;
        options.ignore_unknown_fields = true;
        const auto body = list.empty() ? response.body : "{\"" + list + "\":" + response.body + "}";
        const auto parsed = google::protobuf::util::JsonStringToMessage(body, &message, options);
        reactor->Finish(
            parsed.ok() ? grpc::Status::OK
                        : grpc::Status(grpc::StatusCode::INTERNAL, "the answer has no form in this protocol"));
        return reactor;
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
