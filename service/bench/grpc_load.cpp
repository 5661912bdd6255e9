// Clients that ask a server of the Open Inference Protocol over gRPC for detections in image files: each sends the next
// one when it has the answer for the last. For comparisons: a client in Python would take as long as the server.
#include <grpcpp/grpcpp.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "open_inference.grpc.pb.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Options {
    std::string address;
    std::string model;
    std::string input;
    std::vector<std::string> files;
    int clients = 1;
    double seconds = 5;
    std::size_t batch = 1;
};

double milliseconds(Clock::duration time) {
    return std::chrono::duration<double, std::milli>(time).count();
}

// A file as an element of a tensor of BYTES.
std::string element_of(const std::string& file) {
    std::ifstream stream(file, std::ios::binary);
    const std::string bytes(std::istreambuf_iterator<char>(stream), {});
    const auto length = static_cast<std::uint32_t>(bytes.size());
    return std::string(reinterpret_cast<const char*>(&length), sizeof length) + bytes;
}

// The request for as many images as one has, from this file on.
inference::ModelInferRequest request_of(
    const Options& options, const std::vector<std::string>& elements, std::size_t first) {
    inference::ModelInferRequest request;
    request.set_model_name(options.model);
    auto& input = *request.add_inputs();
    input.set_name(options.input);
    input.set_datatype("BYTES");
    input.add_shape(static_cast<std::int64_t>(options.batch));
    std::string tensor;
    for (std::size_t index = 0; index < options.batch; ++index) {
        tensor += elements[(first + index) % elements.size()];
    }
    request.add_raw_input_contents(std::move(tensor));
    return request;
}

// What clients met.
struct Answers {
    std::mutex mutex;
    std::vector<double> ms;
    std::string failure;
};

void ask(
    const Options& options, const std::vector<inference::ModelInferRequest>& requests, std::size_t first,
    Answers& answers) {
    grpc::ChannelArguments arguments;
    // A connection for each client.
    arguments.SetInt("client", static_cast<int>(first));
    arguments.SetMaxReceiveMessageSize(-1);
    const auto channel = grpc::CreateCustomChannel(options.address, grpc::InsecureChannelCredentials(), arguments);
    const auto stub = inference::GRPCInferenceService::NewStub(channel);
    std::vector<double> mine;
    std::string failure;
    const auto end =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options.seconds));
    for (auto index = first; Clock::now() < end; ++index) {
        grpc::ClientContext context;
        // Many connect at once, and some a moment later.
        context.set_wait_for_ready(true);
        inference::ModelInferResponse response;
        const auto before = Clock::now();
        const auto status = stub->ModelInfer(&context, requests[index % requests.size()], &response);
        if (!status.ok()) {
            failure = status.error_message();
            break;
        }
        mine.push_back(milliseconds(Clock::now() - before));
    }
    const std::lock_guard lock(answers.mutex);
    answers.ms.insert(answers.ms.end(), mine.begin(), mine.end());
    answers.failure = failure.empty() ? answers.failure : failure;
}

}  // namespace

int main(int count, char** arguments) {
    Options options;
    CLI::App app("Asks a server over gRPC and prints the milliseconds of each answer as JSON.", "trtdet-grpc-load");
    app.add_option("address", options.address, "HOST:PORT")->required();
    app.add_option("model", options.model, "name of the model")->required();
    app.add_option("input", options.input, "name of its input")->required();
    app.add_option("files", options.files, "image files")->required()->check(CLI::ExistingFile);
    app.add_option("--clients", options.clients, "clients at the same time")->check(CLI::Range(1, 4096));
    app.add_option("--seconds", options.seconds, "how long they ask")->check(CLI::PositiveNumber);
    app.add_option("--batch", options.batch, "images of each request")->check(CLI::Range(1, 1024));
    CLI11_PARSE(app, count, arguments);
    std::vector<std::string> elements;
    for (const auto& file : options.files) {
        elements.push_back(element_of(file));
    }
    std::vector<inference::ModelInferRequest> requests;
    for (std::size_t first = 0; first < elements.size(); ++first) {
        requests.push_back(request_of(options, elements, first));
    }
    Answers answers;
    const auto start = Clock::now();
    std::vector<std::thread> threads;
    for (int client = 0; client < options.clients; ++client) {
        threads.emplace_back(
            ask, std::cref(options), std::cref(requests), static_cast<std::size_t>(client), std::ref(answers));
    }
    for (auto& thread : threads) {
        thread.join();
    }
    if (!answers.failure.empty()) {
        std::fprintf(stderr, "trtdet-grpc-load: error: %s\n", answers.failure.c_str());
        return 1;
    }
    const nlohmann::json told = {{"ms", answers.ms}, {"seconds", milliseconds(Clock::now() - start) / 1000}};
    std::printf("%s\n", told.dump().c_str());
    return 0;
}
