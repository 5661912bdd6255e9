#include "metrics.hpp"

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <sys/resource.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <sstream>
#include <system_error>
#include <utility>

#include "trtdet/engine.hpp"
#include "trtdet/version.hpp"

namespace trtdet::serve {
namespace {

double seconds(Metrics::Duration duration) {
    return std::chrono::duration<double>(duration).count();
}

// From what a GPU needs for a small network to what a busy CPU needs for a large picture.
prometheus::Histogram::BucketBoundaries short_times() {
    return {0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1};
}

prometheus::Histogram::BucketBoundaries request_times() {
    return {0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30};
}

prometheus::Histogram::BucketBoundaries batches() {
    return {1, 2, 4, 8, 16, 32, 64, 128};
}

}  // namespace

class Metrics::Impl {
public:
    Impl() {
        prometheus::BuildGauge()
            .Name("trtdet_build_info")
            .Help("1; what this program was built from")
            .Register(registry)
            .Add({{"version", TRTDET_VERSION}, {"tensorrt_headers", built_for_tensorrt()}})
            .Set(1);
        prometheus::BuildGauge()
            .Name("process_start_time_seconds")
            .Help("When the process started, in seconds since 1970")
            .Register(registry)
            .Add({})
            .Set(std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count());
        reloads.Add({{"result", "loaded"}});
        reloads.Add({{"result", "refused"}});
    }

    prometheus::Counter& counter(const char* name, const char* help) {
        return prometheus::BuildCounter().Name(name).Help(help).Register(registry).Add({});
    }

    prometheus::Gauge& gauge(const char* name, const char* help) {
        return prometheus::BuildGauge().Name(name).Help(help).Register(registry).Add({});
    }

    prometheus::Histogram& histogram(
        const char* name, const char* help, const prometheus::Histogram::BucketBoundaries& buckets) {
        return prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add({}, buckets);
    }

    prometheus::Registry registry;
    prometheus::Family<prometheus::Counter>& requests = prometheus::BuildCounter()
                                                            .Name("trtdet_requests_total")
                                                            .Help("Answers by path and status code")
                                                            .Register(registry);
    prometheus::Family<prometheus::Counter>& errors = prometheus::BuildCounter()
                                                          .Name("trtdet_errors_total")
                                                          .Help("Errors by type, the type that the answer carries")
                                                          .Register(registry);
    prometheus::Family<prometheus::Counter>& reloads = prometheus::BuildCounter()
                                                           .Name("trtdet_reloads_total")
                                                           .Help("Bundles that were loaded or refused after the start")
                                                           .Register(registry);
    prometheus::Family<prometheus::Gauge>& bundles = prometheus::BuildGauge()
                                                         .Name("trtdet_bundle_info")
                                                         .Help("1; the bundles that run, and what on")
                                                         .Register(registry);
    prometheus::Counter& images = counter("trtdet_images_total", "Images that were detected on");
    prometheus::Counter& detections =
        counter("trtdet_detections_total", "Detections in them, before a request's own limits");
    prometheus::Counter& left = counter("trtdet_clients_left_total", "Clients that left before their answer was sent");
    prometheus::Gauge& queue = gauge("trtdet_queue_images", "Images that wait for a batch");
    prometheus::Gauge& flying = gauge("trtdet_requests_in_flight", "Requests with images that are worked on");
    prometheus::Gauge& held = gauge("trtdet_body_bytes", "Bytes of the bodies that are held");
    prometheus::Gauge& decoding =
        gauge("trtdet_decoding_bytes", "Bytes that images, numbers and answers take while they are worked on");
    prometheus::Gauge& open = gauge("trtdet_connections", "Open connections");
    prometheus::Histogram& detect = histogram(
        "trtdet_detect_seconds", "From the last byte of a request with images to its answer; of status 200",
        request_times());
    prometheus::Histogram& decode =
        histogram("trtdet_decode_seconds", "Decoding and pre-processing of an image", short_times());
    prometheus::Histogram& wait =
        histogram("trtdet_queue_seconds", "From its pre-processing to its run, of an image", short_times());
    prometheus::Histogram& run = histogram("trtdet_run_seconds", "The engine's run of a batch", short_times());
    prometheus::Histogram& batch_images = histogram("trtdet_batch_images", "Images in a batch", batches());

    prometheus::Family<prometheus::Gauge>& model_queues = prometheus::BuildGauge()
                                                              .Name("trtdet_model_queue_images")
                                                              .Help("Images that wait for a batch, by model")
                                                              .Register(registry);
    prometheus::Family<prometheus::Gauge>& running =
        prometheus::BuildGauge().Name("trtdet_running_batches").Help("Batches in work, by model").Register(registry);
    prometheus::Family<prometheus::Gauge>& lanes = prometheus::BuildGauge()
                                                       .Name("trtdet_lane_batch_age_seconds")
                                                       .Help("How long a lane has its batch; 0 where it waits for one")
                                                       .Register(registry);
    prometheus::Counter& cpu = counter("process_cpu_seconds_total", "User and system time");
    prometheus::Gauge& resident = gauge("process_resident_memory_bytes", "Resident memory");
    prometheus::Gauge& address_space = gauge("process_virtual_memory_bytes", "Address space in use");
    prometheus::Gauge& descriptors = gauge("process_open_fds", "Open descriptors");
    prometheus::Gauge& most_descriptors = gauge("process_max_fds", "Descriptors that may be open");
    prometheus::Gauge& threads = gauge("process_threads", "Threads");
    std::mutex text_mutex;

    // What of this cannot be read keeps its value.
    void read_process() {
        rusage usage{};
        if (getrusage(RUSAGE_SELF, &usage) == 0) {
            const auto total = [](const timeval& time) {
                return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
            };
            cpu.Increment(std::max(0.0, total(usage.ru_utime) + total(usage.ru_stime) - cpu.Value()));
        }
        rlimit limit{};
        if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
            most_descriptors.Set(static_cast<double>(limit.rlim_cur));
        }
        std::ifstream status("/proc/self/status");
        for (std::string line; std::getline(status, line);) {
            std::istringstream words(line);
            std::string name;
            double number = 0;
            words >> name >> number;
            if (name == "VmSize:") {
                address_space.Set(number * 1024);
            } else if (name == "VmRSS:") {
                resident.Set(number * 1024);
            } else if (name == "Threads:") {
                threads.Set(number);
            }
        }
        std::error_code error;
        std::filesystem::directory_iterator open_files("/proc/self/fd", error);
        if (!error) {
            // Less the folder itself.
            descriptors.Set(static_cast<double>(std::distance(open_files, std::filesystem::directory_iterator()) - 1));
        }
    }

    std::mutex bundle_mutex;
    std::map<std::string, prometheus::Gauge*> bundle;  // of bundles, by the name that they are served as
};

Metrics::Metrics() : impl_(std::make_unique<Impl>()) {}

Metrics::~Metrics() = default;

void Metrics::answered(std::string_view path, int code) {
    impl_->requests.Add({{"path", std::string(path)}, {"code", std::to_string(code)}}).Increment();
}

void Metrics::detected(Duration took) {
    impl_->detect.Observe(seconds(took));
}

void Metrics::image(std::optional<Duration> decoded, Duration queued, std::size_t detections) {
    impl_->images.Increment();
    impl_->detections.Increment(static_cast<double>(detections));
    if (decoded) {
        impl_->decode.Observe(seconds(*decoded));
    }
    impl_->wait.Observe(seconds(queued));
}

void Metrics::batch(int images, Duration ran) {
    impl_->batch_images.Observe(images);
    impl_->run.Observe(seconds(ran));
}

void Metrics::error(std::string_view type) {
    impl_->errors.Add({{"type", std::string(type)}}).Increment();
}

void Metrics::client_left() {
    impl_->left.Increment();
}

void Metrics::reloaded() {
    impl_->reloads.Add({{"result", "loaded"}}).Increment();
}

void Metrics::reload_refused() {
    impl_->reloads.Add({{"result", "refused"}}).Increment();
}

void Metrics::bundle(const BundleInfo& info) {
    const std::lock_guard lock(impl_->bundle_mutex);
    auto& added = impl_->bundles.Add(
        {{"served_as", info.served_as},
         {"model", info.model},
         {"content_hash", info.content_hash},
         {"runs_on", info.ran_on},
         {"trtdet_version", info.trtdet_version}});
    added.Set(1);
    auto*& before = impl_->bundle[info.served_as];
    if (before != nullptr && before != &added) {
        impl_->bundles.Remove(before);
    }
    before = &added;
}

void Metrics::unloaded(const std::string& served_as) {
    const std::lock_guard lock(impl_->bundle_mutex);
    if (const auto found = impl_->bundle.find(served_as); found != impl_->bundle.end()) {
        impl_->bundles.Remove(found->second);
        impl_->bundle.erase(found);
    }
}

void Metrics::connections(int change) {
    impl_->open.Increment(change);
}

void Metrics::in_flight(int change) {
    impl_->flying.Increment(change);
}

void Metrics::memory(std::uint64_t bodies, std::uint64_t decoding) {
    impl_->held.Set(static_cast<double>(bodies));
    impl_->decoding.Set(static_cast<double>(decoding));
}

std::string Metrics::text(const std::vector<ModelState>& models) {
    // One at a time: the last word on a gauge is of the same moment as the text.
    const std::lock_guard lock(impl_->text_mutex);
    std::size_t queued = 0;
    for (const auto& model : models) {
        const std::pair<const std::string, std::string> name{"served_as", model.served_as};
        impl_->model_queues.Add({name}).Set(static_cast<double>(model.queued));
        queued += model.queued;
        int busy = 0;
        for (std::size_t lane = 0; lane < model.running.size(); ++lane) {
            busy += model.running[lane].count() > 0 ? 1 : 0;
            impl_->lanes.Add({name, {"lane", std::to_string(lane)}}).Set(seconds(model.running[lane]));
        }
        impl_->running.Add({name}).Set(busy);
    }
    impl_->queue.Set(static_cast<double>(queued));
    impl_->read_process();
    std::ostringstream text;
    prometheus::TextSerializer().Serialize(text, impl_->registry.Collect());
    return text.str();
}

}  // namespace trtdet::serve
