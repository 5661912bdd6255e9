#include "trtdet/detector.hpp"

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <future>
#include <list>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>
#include <variant>

#include "batch_threads.hpp"
#include "preprocess.hpp"
#include "text.hpp"
#include "trtdet/cores.hpp"
#include "trtdet/errors.hpp"

namespace trtdet {

namespace {

// Where the outputs are that detections are read from, and how large they are.
struct Layout {
    bool host = false;
    std::size_t boxes = 0;
    std::size_t scores = 0;
    std::size_t counts = 0;   // not with host
    std::size_t classes = 0;  // not with host
    std::size_t rows = 0;     // boxes of an image: candidates with host, else the room for detections
    std::size_t columns = 0;  // classes of an image's scores, with host
    std::optional<std::size_t> masks;
    std::optional<std::size_t> coefficients;  // and prototypes
    std::size_t prototypes = 0;
    std::optional<std::size_t> keypoints;
    std::optional<std::size_t> rotated_boxes;
};

// The place of an output that is as it has to be.
std::size_t place_of(
    const Engine& engine, const std::string& name, DType dtype, const std::vector<std::int64_t>& shape) {
    const auto& outputs = engine.outputs();
    const auto found =
        std::find_if(outputs.begin(), outputs.end(), [&](const OutputSpec& output) { return output.name == name; });
    if (found == outputs.end()) {
        throw EngineError("the engine has no output '" + name + "'; build the bundle again");
    }
    // 0 stands for any size.
    bool same = found->dtype == dtype && found->shape.size() == shape.size();
    for (std::size_t axis = 0; same && axis < shape.size(); ++axis) {
        same = shape[axis] == 0 ? found->shape[axis] > 0 : found->shape[axis] == shape[axis];
    }
    if (!same) {
        throw EngineError(
            "the engine's output '" + name + "' has shape " + shape_text(found->shape) +
            " or a type that is not what the manifest " + "needs, " + shape_text(shape) + "; build the bundle again");
    }
    return static_cast<std::size_t>(found - outputs.begin());
}

// What a one-stage detector gives beside boxes, in the rows of those.
void find_parts(Layout& found, const Manifest& manifest, const Engine& engine, std::int64_t rows) {
    if (const auto& masks = manifest.parts.masks) {
        found.coefficients = place_of(engine, masks->coefficients, DType::float32, {-1, rows, masks->count});
        found.prototypes =
            place_of(engine, masks->prototypes, DType::float32, {-1, masks->count, masks->height, masks->width});
    }
    if (const auto& keypoints = manifest.parts.keypoints) {
        const auto count = static_cast<std::int64_t>(keypoints->names.size());
        found.keypoints = place_of(engine, keypoints->output, DType::float32, {-1, rows, count, 3});
    }
    if (const auto& rotated_boxes = manifest.parts.rotated_boxes) {
        found.rotated_boxes = place_of(engine, rotated_boxes->output, DType::float32, {-1, rows, 5});
    }
}

Layout layout_of(const Manifest& manifest, const Engine& engine) {
    Layout found;
    found.host = manifest.nms.where == Suppression::host;
    found.boxes = place_of(engine, "boxes", DType::float32, {-1, 0, 4});
    const std::int64_t rows = engine.outputs()[found.boxes].shape[1];
    found.rows = static_cast<std::size_t>(rows);
    find_parts(found, manifest, engine, rows);
    if (found.host) {
        found.columns = manifest.classes.size();
        found.scores = place_of(engine, "scores", DType::float32, {-1, rows, static_cast<std::int64_t>(found.columns)});
        return found;
    }
    found.counts = place_of(engine, "num_dets", DType::int32, {-1, 1});
    found.scores = place_of(engine, "scores", DType::float32, {-1, rows});
    found.classes = place_of(engine, "classes", DType::int32, {-1, rows});
    if (const auto& masks = manifest.masks) {
        found.masks = place_of(engine, masks->output, DType::float32, {-1, rows, masks->size, masks->size});
    }
    return found;
}

struct Job {
    std::variant<Resized, std::vector<float>> input;  // an image, or what the network takes
    Clock::time_point arrived;
    Clock::time_point deadline;
    std::function<void(Outcome)> done;
    std::uint64_t turn = 0;
};

// The callback goes with its call: a lane keeps its last batch until there is another, and what a callback holds, such
// as the detector itself, must not wait for that.
void answer(Job& job, Outcome outcome) {
    const auto done = std::move(job.done);
    try {
        done(std::move(outcome));
    } catch (...) {
        // A callback must not throw; the others of the batch must get their answer all the same.
    }
}

// Writes an image's part of the network's input.
void fill(const Job& job, const Preprocess& to, float* input) {
    if (const auto* const image = std::get_if<Resized>(&job.input)) {
        normalise(*image, to, input);
    } else {
        const auto& values = std::get<std::vector<float>>(job.input);
        std::copy(values.begin(), values.end(), input);
    }
}

void refuse(Job& job, std::exception_ptr error) {
    Outcome outcome;
    outcome.error = std::move(error);
    answer(job, std::move(outcome));
}

}  // namespace

class Detector::Impl {
public:
    Impl(Manifest manifest, std::shared_ptr<Engine> engine, DetectorOptions options)
        : manifest_(std::move(manifest)),
          engine_(std::move(engine)),
          options_(std::move(options)),
          layout_(layout_of(manifest_, *engine_)),
          pixels_(manifest_.input.preprocess.values()) {
        const int most = engine_->max_batch();
        max_batch_ = static_cast<std::size_t>(
            options_.max_batch > 0 ? std::min(options_.max_batch, most) : engine_->best_batch());
        const std::size_t most_lanes = static_cast<std::size_t>(std::max(1, options_.lanes));
        helpers_ = std::make_unique<BatchThreads>(std::min(threads_of(options_), max_batch_ - 1), most_lanes);
        try {
            started_.resize(most_lanes);
            threads_.reserve(most_lanes);
            for (std::size_t index = 0; index < most_lanes; ++index) {
                const int graphs = start_lane(index);
                graphs_ = index == 0 ? graphs : std::min(graphs_, graphs);
            }
        } catch (...) {
            stop();
            throw;
        }
    }

    // done has a callback for each image.
    void detect(
        Span<const ImageView> images, Clock::time_point deadline, std::vector<std::function<void(Outcome)>> done,
        std::uint64_t client) {
        {
            // Before the work, which is for nothing otherwise.
            const std::lock_guard lock(mutex_);
            check_room(images.size(), 1);
        }
        std::list<Job> jobs;
        for (std::size_t index = 0; index < images.size(); ++index) {
            Job& job = jobs.emplace_back();
            job.input = resize(images[index], manifest_.input.preprocess);
            job.deadline = deadline;
            job.done = std::move(done[index]);
        }
        enqueue(std::move(jobs), client);
    }

    void detect_input(
        std::vector<float> input, Clock::time_point deadline, std::function<void(Outcome)> done, std::uint64_t client) {
        if (input.size() != pixels_) {
            throw ImageError(
                "the input has " + std::to_string(input.size()) + " values, expected " + std::to_string(pixels_));
        }
        std::list<Job> jobs(1);
        Job& job = jobs.front();
        job.input = std::move(input);
        job.deadline = deadline;
        job.done = std::move(done);
        enqueue(std::move(jobs), client);
    }

    std::size_t queued() const {
        const std::lock_guard lock(mutex_);
        return queue_.size();
    }

    Clock::duration longest_run() const {
        const auto all = running();
        return *std::max_element(all.begin(), all.end());
    }

    std::vector<Clock::duration> running() const {
        const std::lock_guard lock(mutex_);
        const auto now = Clock::now();
        std::vector<Clock::duration> durations;
        for (const auto& start : started_) {
            // A batch that was begun just now is in work, too.
            durations.push_back(start ? std::max(now - *start, Clock::duration(1)) : Clock::duration{});
        }
        return durations;
    }

    void stop() {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        changed_.notify_all();
        const std::lock_guard lock(joining_);
        for (std::thread& thread : threads_) {
            if (thread.joinable()) {
                thread.join();
            }
        }
    }

    const Manifest& manifest() const { return manifest_; }
    const Engine& engine() const { return *engine_; }
    int graphs() const { return graphs_; }

private:
    // Starts a thread with a lane of its own and waits until that is warm. Returns as Lane::warm_up().
    int start_lane(std::size_t index) {
        // All memory is taken here and not by the thread, in which nobody could be told that there is none. The
        // warm-up is the thread's: what libraries keep for each thread they take in its first run, and some abort the
        // process where there is none.
        auto batch = std::make_unique<std::vector<Job>>();
        batch->reserve(max_batch_);
        std::promise<int> warm;
        auto warmed = warm.get_future();
        threads_.emplace_back(
            [this, index, lane = engine_->new_lane(), room = std::move(batch), warm = std::move(warm)]() mutable {
                try {
                    warm.set_value(lane->warm_up(static_cast<int>(max_batch_)));
                } catch (...) {
                    warm.set_exception(std::current_exception());
                    return;
                }
                serve(*lane, index, *room);
            });
        return warmed.get();
    }

    // All or none. Fair queueing by start times (Goyal, Vin and Cheng, SIGCOMM 1996), where each image counts as one: a
    // client's next image has the turn after its last one, or after that which runs now.
    void enqueue(std::list<Job> jobs, std::uint64_t client) {
        const std::size_t bytes = bytes_of(jobs.begin(), jobs.end());
        {
            const std::lock_guard lock(mutex_);
            check_room(jobs.size(), bytes);
            std::uint64_t& last = last_turns_[client];
            waiting_bytes_ += bytes;
            while (!jobs.empty()) {
                jobs.front().arrived = Clock::now();
                jobs.front().turn = last = std::max(last, turn_) + 1;
                auto place = queue_.end();
                while (place != queue_.begin() && std::prev(place)->turn > last) {
                    --place;
                }
                queue_.splice(place, jobs, jobs.begin());
            }
        }
        // All: one may wait for work, another one for more of it.
        changed_.notify_all();
    }

    static std::size_t threads_of(const DetectorOptions& options) {
        return static_cast<std::size_t>(options.threads > 0 ? options.threads : usable_cores() - 1);
    }

    template <typename Iterator>
    static std::size_t bytes_of(Iterator begin, Iterator end) {
        return std::accumulate(begin, end, std::size_t{0}, [](std::size_t sum, const Job& job) {
            const auto* const image = std::get_if<Resized>(&job.input);
            return sum + (image != nullptr ? image->pixels.size()
                                           : std::get<std::vector<float>>(job.input).size() * sizeof(float));
        });
    }

    void check_room(std::size_t images, std::size_t bytes) const {
        if (stopping_) {
            throw StoppedError("the detector was stopped and takes no more images; open the bundle again");
        }
        if (queue_.size() + images > options_.queue_capacity) {
            throw OverloadedError(
                std::to_string(queue_.size()) + " images wait, there is room for " +
                std::to_string(options_.queue_capacity) + ", and " + std::to_string(images) +
                " more are not taken; try again later, or give the queue more room");
        }
        // There is room for one image however large it is.
        const bool alone = queue_.empty() && images == 1;
        if (!alone && waiting_bytes_ + bytes > options_.queue_bytes) {
            throw OverloadedError(
                "images of " + std::to_string(waiting_bytes_) + " bytes wait, there is room for " +
                std::to_string(options_.queue_bytes) + ", and " + std::to_string(images) +
                " more are not taken; try again later, or give the queue more room");
        }
    }

    // Fills a lane's batch with the next images to run together, oldest first. Returns whether there are any; if not,
    // there will be no more. The batch has room for as many as there may be.
    bool next(std::size_t lane, std::vector<Job>& batch) {
        batch.clear();
        std::unique_lock lock(mutex_);
        started_[lane].reset();
        // One lane at a time waits for a batch to fill; the others would take it apart.
        changed_.wait(lock, [&] { return (stopping_ && queue_.empty()) || (!queue_.empty() && !forming_); });
        if (queue_.empty()) {
            return false;
        }
        forming_ = true;
        if (queue_.size() < max_batch_) {
            const auto oldest = std::min_element(queue_.begin(), queue_.end(), [](const Job& one, const Job& other) {
                return one.arrived < other.arrived;
            });
            changed_.wait_until(
                lock, oldest->arrived + options_.max_delay, [&] { return stopping_ || queue_.size() >= max_batch_; });
        }
        const std::size_t count = std::min(max_batch_, queue_.size());
        const auto end = std::next(queue_.begin(), static_cast<std::ptrdiff_t>(count));
        waiting_bytes_ -= bytes_of(queue_.begin(), end);
        turn_ = std::max(turn_, std::prev(end)->turn);
        batch.assign(std::make_move_iterator(queue_.begin()), std::make_move_iterator(end));
        queue_.erase(queue_.begin(), end);
        forget_turns();
        forming_ = false;
        started_[lane] = Clock::now();
        lock.unlock();
        changed_.notify_all();
        return true;
    }

    // Those that are over say nothing any more.
    void forget_turns() {
        constexpr std::size_t most = 4096;
        if (queue_.empty()) {
            last_turns_.clear();
        }
        for (auto one = last_turns_.begin(); one != last_turns_.end() && last_turns_.size() > most;) {
            one = one->second <= turn_ ? last_turns_.erase(one) : std::next(one);
        }
    }

    void serve(Lane& lane, std::size_t index, std::vector<Job>& batch) {
        while (next(index, batch)) {
            const auto now = Clock::now();
            const auto late =
                std::stable_partition(batch.begin(), batch.end(), [&](const Job& job) { return job.deadline > now; });
            for (auto job = late; job != batch.end(); ++job) {
                refuse(*job, late_);
            }
            batch.erase(late, batch.end());
            if (batch.empty()) {
                continue;
            }
            run(lane, batch);
        }
    }

    // Runs images and answers each. What fails with one of them alone is not the others' loss.
    void run(Lane& lane, std::vector<Job>& batch) {
        try {
            helpers_->each(batch.size(), [&](std::size_t index) {
                fill(batch[index], manifest_.input.preprocess, lane.input().part(index * pixels_, pixels_).data());
            });
            const auto count = static_cast<int>(batch.size());
            const auto start = Clock::now();
            lane.run(count);
            const auto ran = Clock::now() - start;
            if (options_.on_batch) {
                options_.on_batch(count, ran);
            }
            helpers_->each(batch.size(), [&](std::size_t index) {
                Job& job = batch[index];
                Outcome outcome;
                try {
                    const auto* const resized = std::get_if<Resized>(&job.input);
                    outcome.found.detections = read(lane, index, resized);
                    outcome.found.batch = count;
                    outcome.found.queued = start - job.arrived;
                    outcome.found.ran = ran;
                    read_parts(lane, index, resized, outcome.found);
                } catch (...) {
                    outcome.error = std::current_exception();
                }
                answer(job, std::move(outcome));
            });
        } catch (...) {
            for (Job& job : batch) {
                if (job.done) {
                    refuse(job, std::current_exception());
                }
            }
        }
    }

    std::vector<Detection> read(const Lane& lane, std::size_t image, const Resized* resized) const {
        const auto* const boxes = lane.output(layout_.boxes).as<float>().data() + image * layout_.rows * 4;
        const auto* const scores = lane.output(layout_.scores).as<float>().data();
        std::vector<Detection> found;
        if (layout_.host) {
            const float* const rotated =
                layout_.rotated_boxes ? rows_of(lane, *layout_.rotated_boxes, image, 5) : nullptr;
            found = non_max_suppression(
                boxes, scores + image * layout_.rows * layout_.columns, layout_.rows, layout_.columns, manifest_.nms,
                rotated);
        } else {
            const int count = lane.output(layout_.counts).as<std::int32_t>()[image];
            const auto* const classes = lane.output(layout_.classes).as<std::int32_t>().data() + image * layout_.rows;
            if (count < 0 || static_cast<std::size_t>(count) > layout_.rows) {
                throw EngineError(
                    "the engine tells of " + std::to_string(count) + " detections, and has room for " +
                    std::to_string(layout_.rows) + "; build the bundle again");
            }
            for (std::size_t index = 0; index < static_cast<std::size_t>(count); ++index) {
                if (classes[index] < 0 || static_cast<std::size_t>(classes[index]) >= manifest_.classes.size()) {
                    throw EngineError(
                        "the engine tells of class " + std::to_string(classes[index]) + ", and there are " +
                        std::to_string(manifest_.classes.size()) + "; build the bundle again");
                }
                const float* const box = boxes + 4 * index;
                found.push_back(
                    {{box[0], box[1], box[2], box[3]}, scores[image * layout_.rows + index], classes[index], index});
            }
        }
        if (resized != nullptr) {
            for (Detection& detection : found) {
                detection.box = resized->placement.to_image(detection.box);
            }
        }
        return found;
    }

    // The rows of an output with so many values in each.
    const float* rows_of(const Lane& lane, std::size_t output, std::size_t image, std::size_t values) const {
        return lane.output(output).as<float>().data() + image * layout_.rows * values;
    }

    // What belongs to the detections of an image.
    void read_parts(const Lane& lane, std::size_t image, const Resized* resized, Found& found) const {
        const auto& all = found.detections;
        found.masks = read_masks(lane, image, all.size(), resized);
        if (layout_.coefficients) {
            read_prototypes(lane, image, resized, found);
        }
        if (layout_.keypoints) {
            const std::size_t count = manifest_.parts.keypoints->names.size();
            const float* const rows = rows_of(lane, *layout_.keypoints, image, 3 * count);
            found.keypoints.reserve(all.size() * count);
            for (const Detection& detection : all) {
                const float* values = rows + detection.row * 3 * count;
                for (std::size_t index = 0; index < count; ++index, values += 3) {
                    const Keypoint keypoint{values[0], values[1], values[2]};
                    found.keypoints.push_back(
                        resized != nullptr ? resized->placement.keypoint_to_image(keypoint) : keypoint);
                }
            }
        }
        if (layout_.rotated_boxes) {
            const float* const rows = rows_of(lane, *layout_.rotated_boxes, image, 5);
            found.rotated_boxes.reserve(all.size());
            for (const Detection& detection : all) {
                const float* const values = rows + detection.row * 5;
                const RotatedBox box{values[0], values[1], values[2], values[3], values[4]};
                found.rotated_boxes.push_back(resized != nullptr ? resized->placement.rotated_to_image(box) : box);
            }
        }
    }

    void read_prototypes(const Lane& lane, std::size_t image, const Resized* resized, Found& found) const {
        const PrototypeSpec& spec = *manifest_.parts.masks;
        const Preprocess& input = manifest_.input.preprocess;
        PrototypeMasks& masks = found.prototype_masks;
        masks.count = spec.count;
        masks.height = spec.height;
        masks.width = spec.width;
        masks.threshold = spec.threshold;
        masks.input_height = input.height;
        masks.input_width = input.width;
        masks.placement = resized != nullptr ? resized->placement : Placement{1, 1, 0, 0, input.width, input.height};
        const auto count = static_cast<std::size_t>(spec.count);
        const float* const rows = rows_of(lane, *layout_.coefficients, image, count);
        for (const Detection& detection : found.detections) {
            masks.coefficients.insert(
                masks.coefficients.end(), rows + detection.row * count, rows + (detection.row + 1) * count);
        }
        const std::size_t values = count * static_cast<std::size_t>(spec.height) * static_cast<std::size_t>(spec.width);
        const auto all = lane.output(layout_.prototypes).as<float>().part(image * values, values);
        masks.prototypes.assign(all.begin(), all.end());
    }

    Masks read_masks(const Lane& lane, std::size_t image, std::size_t count, const Resized* resized) const {
        Masks found;
        if (!layout_.masks) {
            return found;
        }
        found.side = manifest_.masks->size;
        found.threshold = manifest_.masks->threshold;
        found.width = resized != nullptr ? resized->placement.width : manifest_.input.preprocess.width;
        found.height = resized != nullptr ? resized->placement.height : manifest_.input.preprocess.height;
        const auto values = static_cast<std::size_t>(found.side) * static_cast<std::size_t>(found.side);
        const auto all = lane.output(*layout_.masks).as<float>().part(image * layout_.rows * values, count * values);
        found.probabilities.assign(all.begin(), all.end());
        return found;
    }

    const Manifest manifest_;
    const std::shared_ptr<Engine> engine_;
    const DetectorOptions options_;
    const Layout layout_;
    const std::size_t pixels_;  // numbers of one image
    std::size_t max_batch_ = 1;
    int graphs_ = 0;

    // Made beforehand: a lane has nobody to tell that there is no memory for it.
    const std::exception_ptr late_ =
        std::make_exception_ptr(DeadlineError("the image waited until its deadline; give it more time, or send fewer"));

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::list<Job> queue_;                                         // by their turns
    std::uint64_t turn_ = 0;                                       // of the last image that was taken from it
    std::unordered_map<std::uint64_t, std::uint64_t> last_turns_;  // of each client's images
    std::size_t waiting_bytes_ = 0;                                // of the images in it
    std::vector<std::optional<Clock::time_point>> started_;        // of the batch that each lane works on
    bool forming_ = false;
    bool stopping_ = false;

    std::unique_ptr<BatchThreads> helpers_;
    std::mutex joining_;
    std::vector<std::thread> threads_;
};

RunLengths Found::mask(std::size_t index) const {
    const bool none = masks.side < 1 && prototype_masks.count < 1;
    if (none || index >= detections.size()) {
        throw EngineError(
            none ? "the bundle has no masks; build it from a model that gives them"
                 : "there are " + std::to_string(detections.size()) + " detections and no mask of number " +
                       std::to_string(index) + ", from 0");
    }
    if (prototype_masks.count > 0) {
        return prototype_mask(prototype_masks, index, detections[index].box);
    }
    return paste_mask(masks[index], detections[index].box, masks.width, masks.height, masks.threshold);
}

Detector::Detector(Manifest manifest, std::shared_ptr<Engine> engine, DetectorOptions options)
    : impl_(std::make_unique<Impl>(std::move(manifest), std::move(engine), std::move(options))) {}

Detector::~Detector() {
    stop();
}

std::unique_ptr<Detector> Detector::open(
    const std::filesystem::path& folder, const EngineOptions& engine, DetectorOptions options) {
    const Bundle bundle = Bundle::open(folder);
    return std::make_unique<Detector>(bundle.manifest(), open_engine(bundle, engine), std::move(options));
}

std::future<Found> Detector::detect(const ImageView& image, Clock::time_point deadline) {
    return std::move(detect(Span<const ImageView>(&image, 1), deadline).front());
}

void Detector::detect(
    const ImageView& image, Clock::time_point deadline, std::function<void(Outcome)> done, std::uint64_t client) {
    std::vector<std::function<void(Outcome)>> all;
    all.push_back(std::move(done));
    impl_->detect({&image, 1}, deadline, std::move(all), client);
}

std::vector<std::future<Found>> Detector::detect(Span<const ImageView> images, Clock::time_point deadline) {
    std::vector<std::future<Found>> found;
    std::vector<std::function<void(Outcome)>> done;
    for (std::size_t index = 0; index < images.size(); ++index) {
        auto promise = std::make_shared<std::promise<Found>>();
        found.push_back(promise->get_future());
        done.emplace_back([promise](Outcome outcome) {
            if (outcome.error) {
                promise->set_exception(outcome.error);
            } else {
                promise->set_value(std::move(outcome.found));
            }
        });
    }
    impl_->detect(images, deadline, std::move(done), 0);
    return found;
}

void Detector::detect_input(
    std::vector<float> input, Clock::time_point deadline, std::function<void(Outcome)> done, std::uint64_t client) {
    impl_->detect_input(std::move(input), deadline, std::move(done), client);
}

std::size_t Detector::queued() const {
    return impl_->queued();
}

std::vector<Clock::duration> Detector::running() const {
    return impl_->running();
}

Clock::duration Detector::longest_run() const {
    return impl_->longest_run();
}

const Manifest& Detector::manifest() const {
    return impl_->manifest();
}

std::string Detector::ran_on() const {
    return impl_->engine().ran_on();
}

int Detector::graphs() const {
    return impl_->graphs();
}

void Detector::stop() {
    impl_->stop();
}

}  // namespace trtdet
