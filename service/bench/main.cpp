// trtdet-bench: latency and throughput of a bundle in C++, of the engine alone and with everything around it.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <mutex>
#include <nlohmann/json.hpp>
#include <numeric>
#include <opencv2/core/utility.hpp>
#include <set>
#include <thread>

#include "trtdet/detector.hpp"
#include "trtdet/errors.hpp"
#include "trtdet/recording.hpp"

namespace {

using namespace trtdet;
using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

struct Options {
    fs::path bundle;
    fs::path recording;
    double recording_time = 0;  // milliseconds
    fs::path images;
    EngineOptions engine;
    std::vector<fs::path> library_folders;
    std::vector<int> clients{1, 8, 64};
    double seconds = 5;
    double warm_up = 1;
    int max_delay_us = 1000;
    bool no_graphs = false;
    bool json = false;
    DetectorOptions detector;
};

// The milliseconds that each run took, all that ended within so many seconds.
struct Times {
    std::vector<double> ms;
    double seconds = 0;
};

double milliseconds(Clock::duration time) {
    return std::chrono::duration<double, std::milli>(time).count();
}

Clock::time_point after(double seconds) {
    return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

// The smallest value that so large a share is not above (nearest rank).
double percentile(const std::vector<double>& sorted, double share) {
    const auto rank = static_cast<std::size_t>(std::ceil(share * static_cast<double>(sorted.size())));
    return sorted[std::max<std::size_t>(rank, 1) - 1];
}

void add_times(Json& row, Times times, int images_a_run) {
    if (times.ms.empty()) {
        throw EngineError("nothing was finished in the time that was given; give more --seconds");
    }
    std::sort(times.ms.begin(), times.ms.end());
    const auto count = static_cast<double>(times.ms.size());
    row["latency_ms"] = {
        {"mean", std::accumulate(times.ms.begin(), times.ms.end(), 0.0) / count},
        {"p50", percentile(times.ms, 0.5)},
        {"p95", percentile(times.ms, 0.95)},
        {"p99", percentile(times.ms, 0.99)}};
    row["throughput"] = count * images_a_run / times.seconds;
    row["runs"] = times.ms.size();
}

// Images that need no decoding, and of what they are.
struct Ready {
    std::vector<Image> images;
    std::string name;
};

Ready noise(const Preprocess& rule) {
    Image image{rule.width, rule.height, {}};
    std::uint32_t state = 1;
    for (std::size_t index = 0; index < rule.values(); ++index) {
        state = state * 1664525 + 1013904223;
        image.pixels.push_back(static_cast<std::uint8_t>(state >> 24));
    }
    return {{std::move(image)}, "noise, which needs no decoding"};
}

// What a recording knows, as it knows no noise.
Ready recorded(const fs::path& file, const Manifest& manifest) {
    Ready found{recorded_images(file, manifest, 64), ""};
    found.name = std::to_string(found.images.size()) + " images of the recording, which need no decoding";
    return found;
}

// What the clients send: files that are decoded each time, or images that need no decoding.
class Source {
public:
    explicit Source(Ready ready) : ready_(std::move(ready)) {}

    explicit Source(const fs::path& folder) {
        std::set<fs::path> paths;
        std::error_code error;
        for (const auto& entry : fs::directory_iterator(folder, error)) {
            const std::string kind = entry.path().extension().string();
            if (kind == ".jpg" || kind == ".jpeg" || kind == ".png") {
                paths.insert(entry.path());
            }
        }
        for (const fs::path& path : paths) {
            std::ifstream stream(path, std::ios::binary);
            files_.emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
        }
        if (files_.empty()) {
            throw ImageError("'" + folder.string() + "' has no .jpg, .jpeg or .png files; give a folder that has some");
        }
    }

    std::string name() const {
        return files_.empty() ? ready_.name : std::to_string(files_.size()) + " files, decoded each time";
    }

    Image image(std::size_t index) const {
        return files_.empty() ? ready_.images[index % ready_.images.size()]
                              : decode_image(files_[index % files_.size()]);
    }

private:
    std::vector<std::string> files_;
    Ready ready_;
};

Source source_of(const Options& options, const Manifest& manifest) {
    if (!options.images.empty()) {
        return Source(options.images);
    }
    return Source(options.recording.empty() ? noise(manifest.input.preprocess) : recorded(options.recording, manifest));
}

Times time_engine(Engine& engine, const Preprocess& rule, const Source& source, int batch, const Options& options) {
    const auto lane = engine.new_lane();
    const std::size_t pixels = rule.values();
    for (std::size_t index = 0; index < static_cast<std::size_t>(batch); ++index) {
        preprocess(source.image(index), rule, lane->input().part(index * pixels, pixels).data());
    }
    for (const auto end = after(options.warm_up); Clock::now() < end;) {
        lane->run(batch);
    }
    Times times;
    const auto start = Clock::now();
    for (const auto end = after(options.seconds); Clock::now() < end;) {
        const auto before = Clock::now();
        lane->run(batch);
        times.ms.push_back(milliseconds(Clock::now() - before));
    }
    times.seconds = milliseconds(Clock::now() - start) / 1000;
    return times;
}

// Clients that each ask for the next image when they have the answer for the last one.
Times time_clients(Detector& detector, const Source& source, int clients, double seconds, double& mean_batch) {
    std::mutex mutex;
    Times times;
    std::exception_ptr error;
    std::atomic<bool> failed{false};
    double batches = 0;
    const auto start = Clock::now();
    const auto end = after(seconds);
    std::vector<std::thread> threads;
    for (int client = 0; client < clients; ++client) {
        threads.emplace_back([&, client] {
            std::vector<double> mine;
            double in_batches = 0;
            try {
                for (auto index = static_cast<std::size_t>(client); Clock::now() < end && !failed; index += 7) {
                    const auto before = Clock::now();
                    const Found found = detector.detect(source.image(index)).get();
                    mine.push_back(milliseconds(Clock::now() - before));
                    in_batches += found.batch;
                }
            } catch (...) {
                const std::lock_guard lock(mutex);
                error = std::current_exception();
                failed = true;
            }
            const std::lock_guard lock(mutex);
            times.ms.insert(times.ms.end(), mine.begin(), mine.end());
            batches += in_batches;
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    if (error) {
        std::rethrow_exception(error);
    }
    times.seconds = milliseconds(Clock::now() - start) / 1000;
    mean_batch = times.ms.empty() ? 0 : batches / static_cast<double>(times.ms.size());
    return times;
}

Json measure(const Options& options) {
    const Bundle bundle = Bundle::open(options.bundle);
    std::shared_ptr<Engine> engine;
    if (options.recording.empty()) {
        EngineOptions chosen = options.engine;
        chosen.tensorrt.cuda_graphs = !options.no_graphs;
        chosen.tensorrt.library_folders = chosen.onnxruntime.library_folders = options.library_folders;
        engine = open_engine(bundle, chosen);
    } else {
        const auto time = static_cast<std::int64_t>(options.recording_time * 1000);
        engine = open_recording(options.recording, bundle.manifest(), {std::chrono::microseconds(time)});
    }
    const Preprocess& rule = bundle.manifest().input.preprocess;
    const Source source = source_of(options, bundle.manifest());
    Json found = {
        {"bundle", options.bundle.string()},
        {"ran_on", ""},
        {"images", source.name()},
        {"engine", Json::array()},
        {"clients", Json::array()}};
    for (const int batch : std::set<int>{engine->min_batch(), engine->opt_batch(), engine->max_batch()}) {
        Json row = {{"batch", batch}};
        add_times(row, time_engine(*engine, rule, source, batch, options), batch);
        found["engine"].push_back(row);
    }
    DetectorOptions chosen = options.detector;
    chosen.max_delay = std::chrono::microseconds(options.max_delay_us);
    for (const int clients : options.clients) {
        chosen.queue_capacity = std::max<std::size_t>(chosen.queue_capacity, static_cast<std::size_t>(clients));
        Detector detector(bundle.manifest(), engine, chosen);
        double batch = 0;
        time_clients(detector, source, clients, options.warm_up, batch);
        const Times times = time_clients(detector, source, clients, options.seconds, batch);
        Json row = {{"clients", clients}, {"mean_batch", batch}};
        add_times(row, times, 1);
        found["clients"].push_back(row);
    }
    // Only now it is known whether graphs could be captured.
    found["ran_on"] = engine->ran_on();
    return found;
}

void print_rows(const Json& rows, const char* title, const char* key) {
    std::printf(
        "\n%s\n%10s %10s %10s %10s %10s %12s\n", title, key, "mean ms", "p50 ms", "p95 ms", "p99 ms", "images/s");
    for (const Json& row : rows) {
        const Json& ms = row["latency_ms"];
        std::printf(
            "%10d %10.3f %10.3f %10.3f %10.3f %12.1f\n", row[key].get<int>(), ms["mean"].get<double>(),
            ms["p50"].get<double>(), ms["p95"].get<double>(), ms["p99"].get<double>(), row["throughput"].get<double>());
    }
}

void print(const Json& found) {
    std::printf(
        "%s on %s\nimages: %s\n", found["bundle"].get<std::string>().c_str(),
        found["ran_on"].get<std::string>().c_str(), found["images"].get<std::string>().c_str());
    print_rows(found["engine"], "engine alone, copies included", "batch");
    print_rows(found["clients"], "decoding, pre-processing, queue, engine and suppression", "clients");
}

}  // namespace

int main(int count, char** arguments) {
    cv::setNumThreads(1);  // as trtdet-serve
    Options options;
    CLI::App app(
        "Latency and throughput of a bundle, of the engine alone and with everything around it.", "trtdet-bench");
    app.add_option("bundle", options.bundle, "the bundle's folder")->required();
    app.add_option("--images", options.images, "folder of JPEG and PNG files (default: noise, or what was recorded)");
    app.add_option("--recording", options.recording, "replay what service/tests/record.py wrote, with no GPU");
    app.add_option("--recording-time", options.recording_time, "milliseconds that a replayed run takes")
        ->check(CLI::NonNegativeNumber);
    app.add_option(
        "--library-folder", options.library_folders, "where to look for TensorRT's libraries and onnxruntime's first");
    app.add_option_function<std::string>(
           "--backend",
           [&options](const std::string& name) {
               options.engine.backend = name == "tensorrt"      ? Backend::tensorrt
                                        : name == "onnxruntime" ? Backend::onnxruntime
                                                                : Backend::automatic;
           },
           "what runs the bundle; auto: its engine where this machine can run it, else onnxruntime on the CPU")
        ->check(CLI::IsMember({"auto", "tensorrt", "onnxruntime"}))
        ->default_str("auto");
    app.add_option_function<std::string>(
           "--precision",
           [&options](const std::string& name) {
               options.engine.onnxruntime.precision = name == "built"   ? Precision::as_built
                                                      : name == "float" ? Precision::in_float
                                                                        : Precision::automatic;
           },
           "network that onnxruntime runs: as it was built, in FP32, or auto: the faster of those in the bundle")
        ->check(CLI::IsMember({"auto", "built", "float"}))
        ->default_str("auto");
    app.add_option(
           "--onnxruntime-threads", options.engine.onnxruntime.threads, "of a run (default: one a core, less one)")
        ->check(CLI::Range(0, 256));
    app.add_option("--clients", options.clients, "images asked for at the same time")
        ->check(CLI::Range(1, 4096))
        ->capture_default_str();
    app.add_option("--seconds", options.seconds, "of each row")->check(CLI::PositiveNumber)->capture_default_str();
    app.add_option("--warm-up", options.warm_up, "seconds before each row")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    app.add_option("--lanes", options.detector.lanes, "batches at the same time")
        ->check(CLI::Range(1, 64))
        ->capture_default_str();
    app.add_option("--max-batch", options.detector.max_batch, "images together (default: the engine's largest)")
        ->check(CLI::NonNegativeNumber);
    app.add_option("--max-delay-us", options.max_delay_us, "how long an image waits for others")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    app.add_flag("--no-graphs", options.no_graphs, "launch kernels one by one, without CUDA graphs");
    app.add_flag("--json", options.json, "one JSON object on standard output");
    try {
        app.parse(count, arguments);
    } catch (const CLI::ParseError& error) {
        return app.exit(error) == 0 ? 0 : 2;
    }
    try {
        const Json found = measure(options);
        if (options.json) {
            std::printf("%s\n", found.dump().c_str());
        } else {
            print(found);
        }
    } catch (const std::exception& error) {
        std::fprintf(stderr, "trtdet-bench: %s\n", error.what());
        return 1;
    }
    return 0;
}
