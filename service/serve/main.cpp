// trtdet-serve: bundles as an HTTP service. Options only; the parts are in the library `serve`.
#include <malloc.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <opencv2/core/utility.hpp>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "grpc_server.hpp"
#include "http_server.hpp"
#include "log.hpp"
#include "metrics.hpp"
#include "model.hpp"
#include "service.hpp"
#include "trtdet/errors.hpp"
#include "trtdet/version.hpp"

namespace {

using namespace trtdet;
using namespace trtdet::serve;

struct Options {
    ModelOptions model;                                                  // of each, but for its name and bundle
    std::vector<std::pair<std::string, std::filesystem::path>> bundles;  // by the names that they are served as
    ServiceOptions service;
    HttpOptions http;
    std::optional<std::uint16_t> grpc_port;
    Level log_level = Level::info;
    bool log_json = false;
};

std::chrono::milliseconds seconds(double count) {
    return std::chrono::milliseconds(static_cast<std::int64_t>(count * 1000));
}

// The folder of "FOLDER" or "NAME=FOLDER", and the name, which is else the folder's own.
std::pair<std::string, std::filesystem::path> named_bundle(const std::string& text) {
    std::error_code ignored;
    const auto equals = text.find('=');
    const bool named =
        equals != std::string::npos && text.find('/') > equals && !std::filesystem::exists(text, ignored);
    const std::filesystem::path folder = named ? text.substr(equals + 1) : text;
    if (named) {
        return {text.substr(0, equals), folder};
    }
    auto whole = std::filesystem::absolute(folder, ignored).lexically_normal();
    if (!whole.has_filename()) {
        whole = whole.parent_path();
    }
    return {whole.filename().string(), folder};
}

// Throws CLI::ValidationError: a name is empty, has a slash, or comes twice.
std::vector<std::pair<std::string, std::filesystem::path>> named_bundles(const std::vector<std::string>& texts) {
    std::vector<std::pair<std::string, std::filesystem::path>> bundles;
    for (const auto& text : texts) {
        auto bundle = named_bundle(text);
        if (bundle.first.empty() || bundle.second.empty() || bundle.first.find('/') != std::string::npos) {
            throw CLI::ValidationError("bundle", "got '" + text + "', expected FOLDER or NAME=FOLDER");
        }
        for (const auto& other : bundles) {
            if (other.first == bundle.first) {
                throw CLI::ValidationError(
                    "bundle",
                    "two bundles are called '" + bundle.first + "'; give them other names, as in NAME=FOLDER");
            }
        }
        bundles.push_back(std::move(bundle));
    }
    return bundles;
}

// The environment variable of an option: --max-batch is TRTDET_OPTION_MAX_BATCH. Not TRTDET_SERVE_: for a service that
// is called trtdet-serve, Kubernetes sets TRTDET_SERVE_PORT to a URL.
std::string variable_of(const std::string& option) {
    std::string name = "TRTDET_OPTION_" + option;
    std::transform(name.begin(), name.end(), name.begin(), [](char letter) {
        return letter == '-' ? '_' : letter >= 'a' && letter <= 'z' ? static_cast<char>(letter - 'a' + 'A') : letter;
    });
    return name;
}

// Reads the command line and the environment, or leaves with its exit code: 0 after --help and --version, 2 on wrong
// usage.
Options read_options(int count, char** arguments) {
    Options options;
    CLI::App app("Serves bundles of 'trtdet build' over HTTP.", "trtdet-serve");
    app.set_version_flag("--version", TRTDET_VERSION ", runs " + runnable());
    app.get_formatter()->column_width(36);
    std::string recording, level = "info";
    std::vector<std::string> bundles, folders;
    std::int64_t delay = options.model.detector.max_delay.count();
    double recording_time = 0, reload = 1, header = 10, body = 30, idle = 60, write = 30, request = 10, stop = 30,
           drain = 0, engine = 30;
    std::uint64_t max_body = 32, max_bodies = 1024, max_decoded = 1024, max_queue = 1024, max_masks = 64;
    const auto number = [&app](const std::string& name, auto& value, auto low, auto high, const std::string& what) {
        app.add_option(name, value, what)->check(CLI::Range(low, high))->capture_default_str();
    };
    const double day = 86400;

    app.add_option("bundle", bundles, "A bundle's folder, or NAME=FOLDER; without a name it is called as the folder")
        ->required();
    app.add_option("--host", options.http.host, "Address to listen on")->capture_default_str();
    number("--port", options.http.port, 0, 65535, "Port to listen on; 0 for any that is free");
    app.add_option(
           "--admin-port", options.http.admin_port,
           "Second port, with connections of its own: for probes, and to load and unload models; 0 for any")
        ->check(CLI::Range(0, 65535));
    app.add_option(
           "--grpc-port", options.grpc_port,
           "Port for the Open Inference Protocol over gRPC, on the same host; 0 for any")
        ->check(CLI::Range(0, 65535));
    app.add_option(
        "--require-signature", options.model.public_key,
        "Public Ed25519 key, a PEM file: bundles that it did not sign are refused");
    app.add_option(
        "--recording", recording,
        "Run this recording in place of the engine: a file, or a folder with CONTENT_HASH.recording");
    number("--recording-time", recording_time, 0.0, 60'000.0, "How long a run of the recording takes, in ms");
    app.add_option_function<std::string>(
           "--backend",
           [&options](const std::string& name) {
               options.model.engine.backend = name == "tensorrt"      ? Backend::tensorrt
                                              : name == "onnxruntime" ? Backend::onnxruntime
                                                                      : Backend::automatic;
           },
           "What runs the bundle; auto: its engine where this machine can run it, else onnxruntime on the CPU")
        ->check(CLI::IsMember({"auto", "tensorrt", "onnxruntime"}))
        ->default_str("auto");
    app.add_option_function<std::string>(
           "--precision",
           [&options](const std::string& name) {
               options.model.engine.onnxruntime.precision = name == "built"   ? Precision::as_built
                                                            : name == "float" ? Precision::in_float
                                                                              : Precision::automatic;
           },
           "Network that onnxruntime runs: as it was built, in FP32, or auto: the faster of those in the bundle")
        ->check(CLI::IsMember({"auto", "built", "float"}))
        ->default_str("auto");
    number(
        "--onnxruntime-threads", options.model.engine.onnxruntime.threads, 0, 256,
        "Of a run; 0 for one a core, less one, and on two or three cores all of them for a run beside no other");
    app.add_option(
        "--library-folder", folders,
        "Where libnvinfer and libonnxruntime are looked for first; may be given several times");
    number(
        "--device", options.model.engine.tensorrt.device, -1, 1023,
        "CUDA device that runs engines, by its index; -1 for the first that fits");
    number("--lanes", options.model.detector.lanes, 1, 64, "Batches that are run at the same time");
    number(
        "--max-batch", options.model.detector.max_batch, 0, 4096,
        "Images in a batch; 0 for the engine's largest, or 1 on a CPU");
    number("--max-delay-us", delay, 0, 10'000'000, "How long an image waits for others, in microseconds");
    number("--queue", options.model.detector.queue_capacity, 1, 1'000'000, "Images that may wait");
    number("--max-queue-mb", max_queue, 1, 1'048'576, "Size of all images that wait, resized, in MiB");
    number("--threads", options.http.threads, 1, 256, "Threads for connections");
    number(
        "--workers", options.service.workers, 0, 256,
        "Images of one client that are decoded at a time; 0 for as many as cores may be used");
    number("--max-body-mb", max_body, 1, 4096, "Size of a request's body, in MiB");
    number("--max-bodies-mb", max_bodies, 1, 1'048'576, "Size of all bodies that are held at a time, in MiB");
    number("--max-decoded-mb", max_decoded, 1, 1'048'576, "Memory that images are decoded into at a time, in MiB");
    number("--max-masks-mb", max_masks, 1, 4096, "Size of a request's masks in the answer, in MiB");
    number("--max-pixels", options.service.limits.max_pixels, 1, 2'000'000'000, "Pixels of an image");
    number("--max-side", options.service.limits.max_side, 1, 1'000'000, "Width and height of an image, in pixels");
    number("--max-images", options.service.max_images, 1, 4096, "Images of a request");
    app.add_flag(
        "--exif-orientation", options.service.exif_orientation,
        "Turn images as their EXIF data say; boxes are in pixels of the turned image");
    number(
        "--score-threshold", options.service.score_threshold, 0.0F, 1.0F,
        "Of answers to requests that name none; the bundle's where that is higher");
    number(
        "--max-detections", options.service.max_detections, 0, 1'000'000,
        "Of an image, for requests that name none; 0 for the bundle's");
    number("--max-connections", options.http.max_connections, 1, 1'000'000, "Open connections");
    number("--max-requests", options.service.max_requests, 1, 1'000'000, "Requests that are worked on at a time");
    number(
        "--max-client-percent", options.service.max_client_percent, 1, 100,
        "Part of connections, requests, queue and memory that one address may have; 100 behind a proxy");
    number("--header-timeout", header, 0.001, day, "For a request's header, in seconds");
    number("--body-timeout", body, 0.001, day, "For its body");
    number("--idle-timeout", idle, 0.001, day, "Between two requests");
    number("--write-timeout", write, 0.001, day, "For sending an answer");
    number("--request-timeout", request, 0.001, day, "From a request's last byte to its answer");
    number("--stop-timeout", stop, 0.001, day, "For finishing what has begun, when the service is stopped");
    number(
        "--drain-delay", drain, 0.0, day,
        "From /readyz saying no to the end of listening, when the service is stopped");
    number(
        "--unhealthy-after", options.service.unhealthy_after, 0, 1'000'000,
        "Failures of the engine in a row until /healthz says no; 0 for never");
    number(
        "--engine-timeout", engine, 0.0, day,
        "How long a batch may run until /healthz says no, in seconds; 0 for ever");
    number("--reload-interval", reload, 0.0, day, "How often to look for another bundle; 0 for on SIGHUP only");
    app.add_option("--log-level", level, "Least level that is logged")
        ->check(CLI::IsMember({"debug", "info", "warning", "error"}))
        ->capture_default_str();
    app.add_flag("--log-json", options.log_json, "Log lines as JSON");

    for (auto* option : app.get_options()) {
        const auto name = option->get_name(false, true);
        if (name.find("help") == std::string::npos && name.find("version") == std::string::npos) {
            option->envname(variable_of(option->get_single_name()));
        }
    }
    try {
        app.parse(count, arguments);
        options.bundles = named_bundles(bundles);
    } catch (const CLI::ParseError& error) {
        std::exit(app.exit(error) == 0 ? 0 : 2);
    }
    if (!recording.empty()) {
        options.model.recording = recording;
    }
    options.model.recording_time = std::chrono::microseconds(static_cast<std::int64_t>(recording_time * 1000));
    options.model.engine.tensorrt.library_folders.assign(folders.begin(), folders.end());
    options.model.engine.onnxruntime.library_folders = options.model.engine.tensorrt.library_folders;
    options.model.detector.max_delay = std::chrono::microseconds(delay);
    options.model.reload_interval = seconds(reload);
    options.service.max_body = max_body << 20U;
    options.service.max_decoded = max_decoded << 20U;
    options.service.max_masks = max_masks << 20U;
    options.model.detector.queue_bytes = max_queue << 20U;
    options.service.engine_timeout = seconds(engine);
    options.service.max_bodies = max_bodies << 20U;
    options.service.max_client_images =
        part_of_limit(options.model.detector.queue_capacity, options.service.max_client_percent) +
        options.service.max_images;
    options.http.header_timeout = seconds(header);
    options.http.body_timeout = seconds(body);
    options.http.idle_timeout = seconds(idle);
    options.http.write_timeout = seconds(write);
    options.service.request_timeout = seconds(request);
    options.http.stop_timeout = seconds(stop);
    options.http.drain_delay = seconds(drain);
    options.log_level = level == "debug"     ? Level::debug
                        : level == "info"    ? Level::info
                        : level == "warning" ? Level::warning
                                             : Level::error;
    return options;
}

sigset_t watched_signals() {
    sigset_t set{};
    sigemptyset(&set);
    for (const int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1}) {
        sigaddset(&set, signal);
    }
    return set;
}

// Signals, taken by one thread: they never interrupt another. SIGHUP reloads, the first SIGTERM or SIGINT stops, and
// the second ends the process at once.
class Signals {
public:
    // Keeps them from the threads that are started from now on.
    static void block() {
        const auto set = watched_signals();
        pthread_sigmask(SIG_BLOCK, &set, nullptr);
        signal(SIGPIPE, SIG_IGN);
    }

    Signals(std::function<void()> reload, std::function<void()> stop)
        : thread_([this, reload = std::move(reload), stop = std::move(stop)] { watch(reload, stop); }) {}

    ~Signals() {
        done_ = true;
        pthread_kill(thread_.native_handle(), SIGUSR1);
        thread_.join();
    }

    Signals(const Signals&) = delete;
    Signals& operator=(const Signals&) = delete;

private:
    void watch(const std::function<void()>& reload, const std::function<void()>& stop) const {
        const auto set = watched_signals();
        bool stopping = false;
        for (int signal = 0; sigwait(&set, &signal) == 0 && !done_;) {
            if (signal == SIGHUP) {
                reload();
            } else if (signal != SIGUSR1 && stopping) {
                std::_Exit(1);
            } else if (signal != SIGUSR1) {
                stopping = true;
                stop();
            }
        }
    }

    std::atomic<bool> done_{false};
    std::thread thread_;
};

// Each connection is a descriptor; a soft limit of 1024 is common and too low for as many connections.
void allow_descriptors(int connections, Log& log) {
    rlimit limit{};
    const auto needed = static_cast<rlim_t>(connections) + 256;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= needed) {
        return;
    }
    limit.rlim_cur = std::min(needed, limit.rlim_max);
    setrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_cur < needed) {
        log.write(
            Level::warning, "the limit of open files is too low for --max-connections",
            {{"limit", limit.rlim_cur}, {"needed", needed}});
    }
}

// glibc by itself takes ever larger blocks from the heaps of threads, where those of a model that was replaced stay:
// the service grew with each. What a model takes comes and goes as pages of its own, what an image takes is kept for
// the next, in as many places as there are cores: glibc would have eight times as many, each as full as its worst
// image.
void bound_kept_memory() {
#ifdef __GLIBC__
    constexpr int largest_of_image = 4 << 20;
    ::mallopt(M_MMAP_THRESHOLD, largest_of_image);
    ::mallopt(M_TRIM_THRESHOLD, 4 * largest_of_image);
    rlimit space{};
    const bool bounded = ::getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY;
    ::mallopt(M_ARENA_MAX, bounded ? 1 : std::max(2, static_cast<int>(std::thread::hardware_concurrency())));
#endif
}

int serve_until_stopped(Options options) {
    Signals::block();
    Log log(options.log_level, options.log_json);
    Metrics metrics;
    allow_descriptors(options.http.max_connections * (options.grpc_port ? 2 : 1), log);
    options.model.detector.on_batch = [&metrics](int batch, Clock::duration ran) { metrics.batch(batch, ran); };
    std::vector<std::unique_ptr<Model>> models(options.bundles.size());
    std::vector<ModelSource> sources;
    for (std::size_t i = 0; i < models.size(); ++i) {
        sources.push_back(
            {options.bundles[i].first, [&models, i] { return models[i]->current(); },
             [&models, i](bool load, ModelChanged done) { models[i]->change(load, std::move(done)); }});
    }
    Service service(options.service, std::move(sources), log, metrics);
    // The address first: that it is taken should not be found out after minutes of loading.
    HttpServer server(options.http, service, log, metrics);
    std::optional<GrpcServer> grpc;
    if (options.grpc_port) {
        const auto& http = options.http;
        grpc.emplace(
            GrpcOptions{
                http.host, *options.grpc_port, http.max_connections, http.header_timeout, http.body_timeout,
                http.idle_timeout, http.write_timeout, http.stop_timeout},
            service, log);
    }
    for (std::size_t i = 0; i < models.size(); ++i) {
        std::tie(options.model.name, options.model.bundle) = options.bundles[i];
        models[i] = std::make_unique<Model>(options.model, log, metrics);
    }
    server.listen();
    if (grpc) {
        grpc->serve();
        log.write(Level::info, "listens for gRPC", {{"address", grpc->address()}});
    }
    const auto reload = [&models] {
        for (const auto& model : models) {
            model->reload();
        }
    };
    const Signals signals(reload, [&server] { server.stop(); });
    if (options.http.admin_port) {
        log.write(Level::info, "listens for probes", {{"url", server.admin_url()}});
    }
    std::string runs;
    for (std::size_t i = 0; i < models.size(); ++i) {
        runs += (runs.empty() ? " runs " : ", ") + options.bundles[i].first + " on " + models[i]->current()->ran_on();
    }
    std::cout << "trtdet-serve: " << server.url() << runs << std::endl;
    const bool finished = server.run();
    if (!finished || (grpc && !grpc->stop())) {
        // What was cut may hang in the engine for ever.
        std::_Exit(1);
    }
    log.write(Level::info, "stopped");
    return 0;
}

}  // namespace

int main(int count, char** arguments) {
    bound_kept_memory();
    // Images are prepared on threads of the service's own. OpenCV's would take their cores, and where one of them finds
    // no memory whoever gave it work waits for ever.
    cv::setNumThreads(1);
    const auto options = read_options(count, arguments);
    try {
        return serve_until_stopped(options);
    } catch (const std::bad_alloc&) {
        std::cerr << "trtdet-serve: error: there is not enough memory to start; allow more" << std::endl;
        return 1;
    } catch (const std::exception& error) {
        std::cerr << "trtdet-serve: error: " << error.what() << std::endl;
        return 1;
    }
}
