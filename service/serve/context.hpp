// What the handlers of all endpoints work with.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "clients.hpp"
#include "log.hpp"
#include "memory_budget.hpp"
#include "metrics.hpp"
#include "request.hpp"
#include "statistics.hpp"
#include "trtdet/detector.hpp"
#include "trtdet/image.hpp"

namespace trtdet::serve {

class Workers;

struct ServiceOptions {
    int workers = 0;                      // threads that decode and pre-process; 0 for as many as cores may be used
    std::uint64_t max_body = 32U << 20U;  // bytes
    ImageLimits limits;
    std::size_t max_images = 32;           // of a request
    float score_threshold = 0;             // for requests to /v1 that name none; the bundle's where that is higher
    int max_detections = 0;                // for those that name none; 0 for the bundle's
    bool exif_orientation = false;         // detect on images as they are to be looked at, not as they are stored
    std::uint64_t max_masks = 64U << 20U;  // bytes of a request's masks, as they stand in the answer
    int max_requests = 256;                // that are worked on at a time
    std::chrono::milliseconds request_timeout{10'000};
    int unhealthy_after = 20;                          // images that failed one after the other; 0 for never
    std::chrono::milliseconds engine_timeout{30'000};  // a batch that runs for longer hangs; 0 for none
    std::uint64_t max_bodies = 1U << 30U;              // bytes of all bodies that are held at a time
    std::uint64_t max_decoded = 1U << 30U;             // and of what they are decoded into, and answers
    std::size_t max_client_images = 256;               // that one client may have in decoding and in the queue
    int max_client_percent = 50;                       // of connections, requests and memory, for one client
};

// What the runs of an engine say of its health.
class Health {
public:
    // unhealthy_after: runs that failed one after the other; 0 for never.
    explicit Health(int unhealthy_after) : unhealthy_after_(unhealthy_after) {}

    // in_time: before the request's deadline. An engine that is always too late is of no more use than one that fails.
    void note(const Outcome& outcome, bool in_time);

    // Why the process should be started again, if it should: "the engine failed on the last 20 images".
    std::optional<std::string> trouble() const;

private:
    const int unhealthy_after_;
    std::atomic<int> failed_in_a_row_{0};
};

// Called once with why a model was not loaded or unloaded; empty where it was.
using ModelChanged = std::function<void(const std::string& problem)>;

// A model that is to be served.
struct ModelSource {
    std::string name;  // by which clients ask for it

    // What detects, empty while it is unloaded; asked once for each request. A request may let go of it last, in one of
    // its own threads: it must then be destroyed by another one.
    std::function<std::shared_ptr<Detector>()> current;

    // Loads the model anew, or unloads it, soon and in another thread; empty where that cannot be.
    std::function<void(bool load, ModelChanged done)> change{};
};

// A model that is served.
struct Served {
    Served(ModelSource source, int unhealthy_after)
        : name(std::move(source.name)),
          current(std::move(source.current)),
          change(std::move(source.change)),
          health(unhealthy_after) {}

    const std::string name;
    const std::function<std::shared_ptr<Detector>()> current;
    const std::function<void(bool load, ModelChanged done)> change;
    Health health;
    Statistics statistics;
};

// Any thread may use it; who works for a request keeps it alive.
struct Context {
    // sources: at least one, each name once. Log and metrics must live longer than this.
    Context(ServiceOptions wanted, std::vector<ModelSource> sources, Log& where, Metrics& counts);
    ~Context();

    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    const ServiceOptions options;
    const std::vector<std::unique_ptr<Served>> models;  // the first is what a request gets that names none
    Log& log;
    Metrics& metrics;

    // Null where none has this name.
    Served* find(std::string_view name) const;

    // Why the process should be started again, if it should: for the first model in trouble, or for this one.
    std::optional<Response> trouble() const;
    std::optional<Response> trouble(const Served& model) const;

    // Whether a batch of a model has been running for longer than the engine's timeout.
    bool hangs(const Served& model) const;

    // What images have as their outcome that found no memory: C++ has room for some hundred exceptions without it.
    const std::exception_ptr no_memory = std::make_exception_ptr(std::bad_alloc());

    std::atomic<int> in_flight{0};  // requests that hold a Place
    std::atomic<bool> leaving{false};
    Clients clients;
    MemoryBudget bodies;
    MemoryBudget decoding;                   // and numbers that are read from JSON, and answers
    const std::unique_ptr<Workers> workers;  // decodes and pre-processes
};

// 404, with the names that there are.
Response unknown_model(const Context& context, std::string_view name);

// 503: it was unloaded.
Response unloaded_model(const Served& model);

// The client of a request; where there is no connection, nobody.
std::shared_ptr<Client> client_of(const Head& head);

// One of the requests that may be worked on at a time.
class Place {
public:
    // The answer where all are taken, or all that the client may have.
    static std::variant<std::unique_ptr<Place>, Response> take(
        const std::shared_ptr<Context>& context, const Head& head);

    ~Place();

    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

    // The answer where there is none to be had at this moment.
    static std::optional<Response> refusal(const Context& context, const Head& head);

private:
    Place(std::shared_ptr<Context> context, std::shared_ptr<Client> client);

    const std::shared_ptr<Context> context_;
    const std::shared_ptr<Client> client_;
};

}  // namespace trtdet::serve
