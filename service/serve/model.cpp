#include "model.hpp"

#include <fcntl.h>
#include <malloc.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "trtdet/bundle.hpp"
#include "trtdet/engine.hpp"
#include "trtdet/errors.hpp"
#include "trtdet/recording.hpp"

namespace trtdet::serve {
namespace {

namespace fs = std::filesystem;

// What tells one state of a file from another without reading it; empty where there is none.
std::string state_of(const fs::path& file) {
    struct stat facts {};
    if (::stat(file.c_str(), &facts) != 0) {
        return {};
    }
    return std::to_string(facts.st_dev) + ":" + std::to_string(facts.st_ino) + ":" + std::to_string(facts.st_size) +
           ":" + std::to_string(facts.st_mtim.tv_sec) + "." + std::to_string(facts.st_mtim.tv_nsec);
}

// Not std::filesystem's own, which throws where a folder above may not be read.
bool is_folder(const fs::path& path) {
    std::error_code error;
    return fs::is_directory(path, error);
}

// Whether files cannot be opened for want of descriptors, which is no fault of theirs.
bool no_descriptors() {
    const int descriptor = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) {
        return errno == EMFILE || errno == ENFILE;
    }
    ::close(descriptor);
    return false;
}

// The states of all files in a folder, so that a bundle that was half there is tried again when the rest has come;
// empty where there is no folder. Nothing where it cannot be looked at now.
std::optional<std::string> states_in(const fs::path& folder) {
    std::vector<std::string> lines;
    std::error_code error;
    for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
        lines.push_back(entry->path().filename().string() + " " + state_of(entry->path()));
    }
    if (error && error != std::errc::no_such_file_or_directory && error != std::errc::not_a_directory) {
        return std::nullopt;
    }
    std::sort(lines.begin(), lines.end());
    std::string text;
    for (const auto& line : lines) {
        text += line + "\n";
    }
    return text;
}

// A model that is to be loaded or unloaded.
struct Order {
    bool load = false;
    std::function<void(const std::string& problem)> done;
};

// Detectors that no request holds any more, on their way to the thread that destroys them, and what else it is to do.
struct Retired {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::unique_ptr<Detector>> waiting;
    std::deque<Order> orders;
    int alive = 0;        // made and not yet destroyed
    bool reload = false;  // asked for
    bool stopping = false;
};

}  // namespace

class Model::Impl {
public:
    Impl(ModelOptions options, Log& log, Metrics& metrics)
        : options_(std::move(options)), log_(log), metrics_(metrics) {
        const auto seen = look();
        current_ = open();
        seen_ = seen.value_or(Seen{});
        announce("serves", *current_);
        thread_ = std::thread([this] { watch(); });
    }

    ~Impl() { stop(); }

    Impl(const Impl&) = delete;
    Impl& operator=(const Impl&) = delete;

    std::shared_ptr<Detector> current() const {
        const std::lock_guard lock(mutex_);
        return current_;
    }

    void reload() {
        const std::lock_guard lock(retired_->mutex);
        retired_->reload = true;
        retired_->changed.notify_all();
    }

    void change(bool load, std::function<void(const std::string& problem)> done) {
        {
            const std::lock_guard lock(retired_->mutex);
            if (!retired_->stopping) {
                retired_->orders.push_back({load, std::move(done)});
                retired_->changed.notify_all();
                return;
            }
        }
        done(stopping);
    }

    void stop() {
        {
            const std::lock_guard lock(mutex_);
            stopped_ = true;
        }
        replace(nullptr);
        {
            const std::lock_guard lock(retired_->mutex);
            retired_->stopping = true;
            retired_->changed.notify_all();
        }
        if (thread_.joinable()) {
            thread_.join();
        }
    }

private:
    static constexpr const char* stopping = "the service is stopping";

    // The state of everything that was looked at.
    struct Seen {
        std::string bundle;
        std::string recording;
    };

    // What glibc keeps of a large model that is gone would add up from one to the next, in pieces.
    static void give_back_memory() {
#ifdef __GLIBC__
        ::malloc_trim(0);
#endif
    }

    // Nothing where it cannot be looked at now.
    std::optional<Seen> look() const {
        const auto bundle = states_in(options_.bundle);
        std::optional<std::string> recording("");
        if (options_.recording) {
            recording = is_folder(*options_.recording) ? states_in(*options_.recording) : state_of(*options_.recording);
        }
        return bundle && recording ? std::optional(Seen{*bundle, *recording}) : std::nullopt;
    }

    std::shared_ptr<Detector> open() {
        const auto bundle = Bundle::open(options_.bundle, options_.public_key);
        auto detector = std::make_unique<Detector>(bundle.manifest(), engine_of(bundle), options_.detector);
        {
            const std::lock_guard lock(retired_->mutex);
            ++retired_->alive;
        }
        // Whoever lets go of it last may be one of its own threads, which cannot wait for itself to end.
        return {detector.release(), [retired = retired_](Detector* last) {
                    const std::lock_guard lock(retired->mutex);
                    retired->waiting.emplace_back(last);
                    retired->changed.notify_all();
                }};
    }

    std::shared_ptr<Engine> engine_of(const Bundle& bundle) {
        if (options_.recording) {
            auto file = *options_.recording;
            if (is_folder(file)) {
                file /= bundle.manifest().content_hash + ".recording";
            }
            return open_recording(file, bundle.manifest(), {options_.recording_time});
        }
        EngineOptions engine = options_.engine;
        engine.tensorrt.log = told_by("TensorRT");
        engine.onnxruntime.log = told_by("onnxruntime");
        return open_engine(bundle, engine);
    }

    std::function<void(int, std::string_view)> told_by(std::string library) {
        return [&log = log_, library = std::move(library)](int severity, std::string_view message) {
            const auto level = severity <= 1 ? Level::error : severity == 2 ? Level::warning : Level::debug;
            log.write(level, message, {{"from", library}});
        };
    }

    void announce(std::string_view what, const Detector& detector) {
        const auto& manifest = detector.manifest();
        metrics_.bundle(
            {options_.name, manifest.model_name, manifest.content_hash, detector.ran_on(), manifest.trtdet_version});
        log_.write(
            Level::info, what,
            {{"served_as", options_.name},
             {"bundle", options_.bundle.string()},
             {"model", manifest.model_name},
             {"content_hash", manifest.content_hash},
             {"runs_on", detector.ran_on()},
             {"cuda_graphs", detector.graphs()}});
    }

    // After stop() nothing takes the place of nothing. What was replaced is let go of when the lock has been.
    void replace(std::shared_ptr<Detector> other) {
        const std::lock_guard lock(mutex_);
        if (!other || !stopped_) {
            current_.swap(other);
        }
    }

    void watch() {
        auto next = std::chrono::steady_clock::now() + options_.reload_interval;
        std::unique_lock lock(retired_->mutex);
        while (!retired_->stopping || retired_->alive > 0) {
            const auto wanted = [this] {
                return !retired_->waiting.empty() || !retired_->orders.empty() || retired_->stopping ||
                       retired_->reload;
            };
            if (retired_->stopping) {
                retired_->changed.wait(
                    lock, [this] { return !retired_->waiting.empty() || !retired_->orders.empty(); });
            } else if (options_.reload_interval.count() > 0) {
                retired_->changed.wait_until(lock, next, wanted);
            } else {
                retired_->changed.wait(lock, wanted);
            }
            if (!retired_->waiting.empty()) {
                auto last = std::move(retired_->waiting.front());
                retired_->waiting.pop_front();
                lock.unlock();
                last.reset();
                give_back_memory();
                lock.lock();
                --retired_->alive;
                continue;
            }
            if (!retired_->orders.empty()) {
                const auto order = std::move(retired_->orders.front());
                retired_->orders.pop_front();
                const bool late = retired_->stopping;
                lock.unlock();
                order.done(late ? stopping : carry_out(order.load));
                lock.lock();
                continue;
            }
            if (retired_->stopping) {
                continue;
            }
            const bool asked = std::exchange(retired_->reload, false);
            lock.unlock();
            try {
                follow(asked);
            } catch (const std::exception& error) {
                // No memory to look at it, most likely; it is looked at again.
                log_.write(Level::error, "the bundle could not be looked at", error.what());
            }
            next = std::chrono::steady_clock::now() + options_.reload_interval;
            lock.lock();
        }
    }

    void follow(bool asked) {
        if (unloaded_) {
            return;
        }
        // Taken before the bundle is opened: what changes meanwhile is seen the next time.
        const auto now = look();
        if (!now) {
            return;
        }
        // While a bundle is replaced there is none for a moment. Its recording may be what a refused one lacked.
        const bool changed = now->bundle != seen_.bundle || (refused_ && now->recording != seen_.recording);
        if (!asked && (!changed || state_of(options_.bundle / "manifest.json").empty())) {
            return;
        }
        take_bundle(*now);
    }

    // Returns what went wrong.
    std::string carry_out(bool load) {
        if (!load) {
            unloaded_ = true;
            replace(nullptr);
            metrics_.unloaded(options_.name);
            log_.write(Level::info, "unloaded", {{"served_as", options_.name}});
            return {};
        }
        const auto now = look();
        return now ? take_bundle(*now) : "its folder cannot be looked at now";
    }

    // Opens the bundle in the place of what runs. Returns what went wrong.
    std::string take_bundle(const Seen& now) {
        const auto before = std::exchange(seen_, now);
        try {
            auto next = open();
            announce("serves another bundle", *next);
            replace(std::move(next));
            metrics_.reloaded();
            refused_ = unloaded_ = false;
            return {};
        } catch (const std::exception& error) {
            if (no_descriptors()) {
                seen_ = before;
                log_.write(Level::warning, "a bundle cannot be opened now, as there are too many open files");
                return "there are too many open files";
            }
            refused_ = true;
            metrics_.reload_refused();
            log_.write(
                Level::error, "another bundle was refused, the one before serves on",
                {{"served_as", options_.name}, {"bundle", options_.bundle.string()}, {"reason", error.what()}});
            return error.what();
        }
    }

    const ModelOptions options_;
    Log& log_;
    Metrics& metrics_;
    const std::shared_ptr<Retired> retired_ = std::make_shared<Retired>();
    Seen seen_;
    bool refused_ = false;   // the last one that was tried
    bool unloaded_ = false;  // of the thread's own
    mutable std::mutex mutex_;
    bool stopped_ = false;
    std::shared_ptr<Detector> current_;
    std::thread thread_;
};

Model::Model(ModelOptions options, Log& log, Metrics& metrics)
    : impl_(std::make_unique<Impl>(std::move(options), log, metrics)) {}

Model::~Model() = default;

std::shared_ptr<Detector> Model::current() const {
    return impl_->current();
}

void Model::reload() {
    impl_->reload();
}

void Model::change(bool load, std::function<void(const std::string& problem)> done) {
    impl_->change(load, std::move(done));
}

void Model::stop() {
    impl_->stop();
}

}  // namespace trtdet::serve
