// What the service counts, in Prometheus' text format.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trtdet::serve {

// Which bundle runs, for trtdet_bundle_info.
struct BundleInfo {
    std::string served_as;  // by which clients ask for the model
    std::string model;
    std::string content_hash;
    std::string ran_on;
    std::string trtdet_version;  // that built it
};

// What a model does at this moment.
struct ModelState {
    std::string served_as;
    std::size_t queued = 0;                                    // images that wait
    std::vector<std::chrono::steady_clock::duration> running;  // how long each lane has run its batch; 0 where it waits
};

// Any thread may call any member at any time.
class Metrics {
public:
    using Duration = std::chrono::steady_clock::duration;

    Metrics();
    ~Metrics();

    Metrics(const Metrics&) = delete;
    Metrics& operator=(const Metrics&) = delete;

    // An answer was made. path: one of a few fixed words, as each becomes a time series of its own; code: of HTTP.
    void answered(std::string_view path, int code);

    // A request that runs images was answered with 200; from its last byte to the answer.
    void detected(Duration took);

    // One image of it was found: decoding with pre-processing, if it needed any, waiting, and its detections.
    void image(std::optional<Duration> decoded, Duration queued, std::size_t detections);

    // A batch was run.
    void batch(int images, Duration ran);

    // type: one of the fixed words that answers carry as error.type.
    void error(std::string_view type);

    void client_left();
    void reloaded();
    void reload_refused();
    void bundle(const BundleInfo& info);

    // None runs under this name any more.
    void unloaded(const std::string& served_as);
    void connections(int change);
    void in_flight(int change);
    void memory(std::uint64_t bodies, std::uint64_t decoding);  // bytes that are held at this moment

    // Everything as text, version 0.0.4.
    std::string text(const std::vector<ModelState>& models);

    static constexpr const char* content_type = "text/plain; version=0.0.4; charset=utf-8";

private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace trtdet::serve
