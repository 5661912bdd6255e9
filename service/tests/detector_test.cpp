#include "trtdet/detector.hpp"

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <thread>

#include "bundles.hpp"
#include "trtdet/errors.hpp"
#include "trtdet/recording.hpp"

using namespace trtdet;
using namespace trtdet::tests;
using Catch::Matchers::Contains;
using namespace std::chrono_literals;

namespace {

float score_of(int grey) {
    return 0.2f + static_cast<float>(grey) / 1000;
}

// What the recorded network finds in an image of a grey level: one cat, whose score tells the image.
Recorded recorded(int grey) {
    const std::vector<float> boxes{1, 1, 9, 5, 0, 0, 0, 0, 0, 0, 0, 0};
    return {static_cast<float>(grey), {bytes_of(boxes), bytes_of(std::vector<float>{score_of(grey), 0, 0, 0, 0, 0})}};
}

Image image(int grey, int width = 16, int height = 8) {
    return {width, height, std::vector<std::uint8_t>(static_cast<std::size_t>(3 * width * height), std::uint8_t(grey))};
}

std::shared_ptr<Engine> engine(const Json& manifest, std::chrono::microseconds run_time = 0us) {
    const Folder folder;
    std::vector<Recorded> images;
    for (int grey = 0; grey < 250; grey += 10) {
        images.push_back(recorded(grey));
    }
    return open_recording(
        folder.write("r", recording_of(manifest, images)), parse_manifest(manifest.dump()), {run_time});
}

Manifest manifest() {
    return parse_manifest(manifest_json().dump());
}

// An engine whose every run waits until it is let go, so that a queue can be filled at leisure.
class Gate {
public:
    void open() {
        const std::lock_guard lock(mutex_);
        is_open_ = true;
        changed_.notify_all();
    }
    void wait() {
        std::unique_lock lock(mutex_);
        ++waiting_;
        changed_.notify_all();
        changed_.wait(lock, [&] { return is_open_; });
    }
    void wait_for(int count) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return waiting_ >= count; });
    }

private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_open_ = false;
    int waiting_ = 0;
};

class GatedLane final : public Lane {
public:
    GatedLane(std::unique_ptr<Lane> lane, Gate& gate) : lane_(std::move(lane)), gate_(gate) {}
    Span<float> input() override { return lane_->input(); }
    void run(int batch) override {
        gate_.wait();
        lane_->run(batch);
    }
    TensorView output(std::size_t index) const override { return lane_->output(index); }

private:
    std::unique_ptr<Lane> lane_;
    Gate& gate_;
};

class GatedEngine final : public Engine {
public:
    GatedEngine(std::shared_ptr<Engine> engine, Gate& gate) : engine_(std::move(engine)), gate_(gate) {}
    const std::vector<OutputSpec>& outputs() const override { return engine_->outputs(); }
    int min_batch() const override { return engine_->min_batch(); }
    int opt_batch() const override { return engine_->opt_batch(); }
    int max_batch() const override { return engine_->max_batch(); }
    std::string ran_on() const override { return engine_->ran_on(); }
    std::unique_ptr<Lane> new_lane() override { return std::make_unique<GatedLane>(engine_->new_lane(), gate_); }

private:
    std::shared_ptr<Engine> engine_;
    Gate& gate_;
};

}  // namespace

TEST_CASE("an image gets its own answer, in its own pixels") {
    Detector detector(manifest(), engine(manifest_json()));
    // Twice as large in each direction as the network's input.
    const Found found = detector.detect(image(50, 32, 16)).get();
    REQUIRE(found.detections.size() == 1);
    CHECK(found.detections[0].score == score_of(50));
    CHECK(found.detections[0].class_index == 0);
    CHECK(found.detections[0].box.x1 == 2);
    CHECK(found.detections[0].box.y2 == 10);
    CHECK(found.batch == 1);
    CHECK(detector.ran_on() == "a recording of 25 images");
}

TEST_CASE("many threads each get their own answers, in batches") {
    std::atomic<int> batches{0};
    std::atomic<int> images{0};
    DetectorOptions options;
    options.max_delay = 2ms;
    options.queue_capacity = 1000;
    options.on_batch = [&](int batch, Clock::duration) {
        ++batches;
        images += batch;
    };
    Detector detector(manifest(), engine(manifest_json(), 200us), options);
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&, thread] {
            std::vector<std::pair<int, std::future<Found>>> asked;
            for (int index = 0; index < 50; ++index) {
                const int grey = (thread * 70 + index * 10) % 250;
                asked.emplace_back(grey, detector.detect(image(grey)));
            }
            for (auto& [grey, answer] : asked) {
                const Found found = answer.get();
                const bool right =
                    found.detections.size() == 1 && found.batch <= 4 && found.detections[0].score == score_of(grey);
                wrong += right ? 0 : 1;
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK(wrong == 0);
    CHECK(images == 200);
    CHECK(batches < 200);
}

TEST_CASE("the queue has an end, and stopping finishes what it holds") {
    Gate gate;
    DetectorOptions options;
    options.lanes = 1;
    options.max_batch = 1;
    options.max_delay = 0us;
    options.queue_capacity = 3;
    Detector detector(manifest(), std::make_shared<GatedEngine>(engine(manifest_json()), gate), options);
    std::vector<std::future<Found>> answers;
    answers.push_back(detector.detect(image(0)));
    gate.wait_for(1);
    for (int index = 1; index <= 3; ++index) {
        answers.push_back(detector.detect(image(10 * index)));
    }
    CHECK(detector.queued() == 3);
    CHECK_THROWS_AS(detector.detect(image(0)), OverloadedError);

    std::thread stopping([&] { detector.stop(); });
    gate.open();
    for (std::size_t index = 0; index < answers.size(); ++index) {
        CHECK(answers[index].get().detections.at(0).score == score_of(10 * static_cast<int>(index)));
    }
    stopping.join();
    CHECK_THROWS_AS(detector.detect(image(0)), StoppedError);
    detector.stop();
}

TEST_CASE("clients' images run in turn") {
    Gate gate;
    DetectorOptions options;
    options.lanes = 1;
    options.max_batch = 1;
    options.max_delay = 0us;
    Detector detector(manifest(), std::make_shared<GatedEngine>(engine(manifest_json()), gate), options);
    std::vector<int> order;
    const auto ask = [&](int name, std::uint64_t client) {
        detector.detect(
            image(10), Clock::time_point::max(), [&order, name](const Outcome&) { order.push_back(name); }, client);
    };
    ask(0, 7);
    gate.wait_for(1);
    for (int index = 1; index <= 4; ++index) {
        ask(10 + index, 7);
    }
    // Who comes later waits for one image of each of the others, and not for all.
    ask(21, 8);
    ask(22, 8);
    ask(31, 9);
    gate.open();
    detector.stop();
    CHECK(order == std::vector<int>{0, 11, 21, 31, 12, 22, 13, 14});
}

TEST_CASE("the queue has an end in bytes") {
    // Images wait as a byte a value, what was given as the network takes it as floats.
    constexpr std::size_t values = 3 * 8 * 16;
    const auto taken = [&](std::size_t room, bool as_floats) {
        Gate gate;
        DetectorOptions options;
        options.lanes = 1;
        options.max_batch = 1;
        options.queue_bytes = room;
        Detector detector(manifest(), std::make_shared<GatedEngine>(engine(manifest_json()), gate), options);
        std::vector<std::future<Found>> answers;
        answers.push_back(detector.detect(image(10)));
        gate.wait_for(1);
        std::size_t count = 0;
        try {
            for (; count < 10; ++count) {
                if (as_floats) {
                    detector.detect_input(std::vector<float>(values), Clock::time_point::max(), [](const Outcome&) {});
                } else {
                    answers.push_back(detector.detect(image(20)));
                }
            }
        } catch (const OverloadedError&) {
        }
        gate.open();
        for (auto& answer : answers) {
            answer.get();
        }
        return count;
    };
    CHECK(taken(1U << 30U, false) == 10);
    CHECK(taken(5 * values, false) == 5);
    CHECK(taken(5 * values - 1, false) == 4);
    CHECK(taken(8 * values, true) == 2);
    // One that is alone is taken however large it is.
    CHECK(taken(0, false) == 1);
    CHECK(taken(0, true) == 1);
}

TEST_CASE("a batch that does not end is seen to run longer and longer") {
    Gate gate;
    DetectorOptions options;
    options.max_batch = 1;
    Detector detector(manifest(), std::make_shared<GatedEngine>(engine(manifest_json()), gate), options);
    CHECK(detector.longest_run() == 0s);
    auto first = detector.detect(image(10));
    gate.wait_for(1);
    const auto begin = Clock::now();
    std::this_thread::sleep_for(20ms);
    // The other lane's is younger.
    auto second = detector.detect(image(20));
    gate.wait_for(2);
    CHECK(detector.longest_run() >= 20ms);
    const auto before = Clock::now();
    CHECK(detector.longest_run() >= before - begin);
    gate.open();
    first.get();
    second.get();
    while (detector.longest_run() != 0s) {
        std::this_thread::yield();
    }
}

TEST_CASE("an image whose deadline is over is not run") {
    Gate gate;
    std::atomic<int> ran{0};
    DetectorOptions options;
    options.lanes = 1;
    options.max_delay = 0us;
    options.on_batch = [&](int batch, Clock::duration) { ran += batch; };
    Detector detector(manifest(), std::make_shared<GatedEngine>(engine(manifest_json()), gate), options);
    auto first = detector.detect(image(0));
    gate.wait_for(1);
    auto late = detector.detect(image(10), Clock::now());
    auto in_time = detector.detect(image(20), Clock::now() + 1h);
    gate.open();
    CHECK(first.get().detections.size() == 1);
    CHECK_THROWS_AS(late.get(), DeadlineError);
    CHECK(in_time.get().detections.size() == 1);
    detector.stop();
    CHECK(ran == 2);
}

TEST_CASE("a batch that fails fails as a whole, and the next does not") {
    Gate gate;
    DetectorOptions options;
    options.lanes = 1;
    options.max_delay = 0us;
    std::atomic<int> runs{0};
    options.on_batch = [&](int, Clock::duration) { ++runs; };
    Detector detector(manifest(), std::make_shared<GatedEngine>(engine(manifest_json()), gate), options);
    auto first = detector.detect(image(0));
    gate.wait_for(1);
    auto good = detector.detect(image(10));
    auto bad = detector.detect(image(15));
    gate.open();
    CHECK(first.get().batch == 1);
    CHECK_THROWS_WITH(good.get(), Contains("the recording has no image"));
    CHECK_THROWS_WITH(bad.get(), Contains("the recording has no image"));
    CHECK(detector.detect(image(10)).get().detections.at(0).score == score_of(10));
    CHECK(runs == 2);
}

TEST_CASE("images that are given together run together") {
    Gate gate;
    DetectorOptions options;
    options.lanes = 1;
    options.max_delay = 1h;
    options.queue_capacity = 5;
    Detector detector(manifest(), std::make_shared<GatedEngine>(engine(manifest_json()), gate), options);
    std::vector<Image> images;
    for (const int grey : {20, 0, 40, 10}) {
        images.push_back(image(grey));
    }
    const std::vector<ImageView> views(images.begin(), images.end());
    auto answers = detector.detect(views);
    // They are not looked at any more.
    images.clear();
    gate.wait_for(1);
    CHECK(detector.detect(Span<const ImageView>()).empty());
    const Image more = image(30);
    const std::vector<ImageView> three(3, more);
    auto taken = detector.detect(three);
    CHECK_THROWS_WITH(detector.detect(three), Contains("3 images wait, there is room for 5, and 3 more are not taken"));
    CHECK(detector.queued() == 3);
    std::vector<ImageView> spoilt = {more, ImageView()};
    CHECK_THROWS_AS(detector.detect(spoilt), ImageError);
    CHECK(detector.queued() == 3);
    gate.open();
    std::vector<float> scores;
    for (auto& answer : answers) {
        const Found found = answer.get();
        CHECK(found.batch == 4);
        scores.push_back(found.detections.at(0).score);
    }
    CHECK(scores == std::vector<float>{score_of(20), score_of(0), score_of(40), score_of(10)});
    detector.stop();
    for (auto& answer : taken) {
        CHECK(answer.get().batch == 3);
    }
}

TEST_CASE("the images of a batch are answered by several threads") {
    DetectorOptions options;
    options.lanes = 1;
    options.max_delay = 1h;
    options.threads = 2;
    Detector detector(manifest(), engine(manifest_json()), options);
    // Each callback waits until there are three, which one thread or two would do for ever.
    Gate gate;
    std::promise<void> all;
    std::atomic<int> answered{0};
    const auto done = [&](Outcome outcome) {
        if (++answered == 3) {
            gate.open();
        }
        gate.wait();
        if (outcome.found.detections.at(0).score == score_of(10) && answered == 4) {
            all.set_value();
        }
    };
    for (const int grey : {10, 10, 10, 10}) {
        detector.detect(image(grey), Clock::time_point::max(), done);
    }
    CHECK(all.get_future().wait_for(60s) == std::future_status::ready);
    gate.open();
    detector.stop();
}

TEST_CASE("an image that is none is refused where it is given") {
    Detector detector(manifest(), engine(manifest_json()));
    CHECK_THROWS_AS(detector.detect(Image{}), ImageError);
    CHECK_THROWS_AS(detector.detect(Image{2, 2, std::vector<std::uint8_t>(11)}), ImageError);
}

TEST_CASE("what a callback throws harms no one") {
    Detector detector(manifest(), engine(manifest_json()));
    std::promise<void> called;
    detector.detect(image(0), Clock::time_point::max(), [&](Outcome) {
        called.set_value();
        throw 1;
    });
    called.get_future().wait();
    CHECK(detector.detect(image(10)).get().detections.size() == 1);
}

TEST_CASE("detections that the engine made are read as they are") {
    Json json = manifest_json();
    json["nms"]["where"] = "native";
    json["outputs"] = Json::parse(R"([
        {"name": "num_dets", "dtype": "int32", "shape": ["b", 1]},
        {"name": "boxes", "dtype": "float32", "shape": ["b", 3, 4]},
        {"name": "scores", "dtype": "float32", "shape": ["b", 3]},
        {"name": "classes", "dtype": "int32", "shape": ["b", 3]}
    ])");
    const auto with = [&](std::int32_t count, std::int32_t second) {
        const Recorded one{
            0,
            {bytes_of(std::vector<std::int32_t>{count}),
             bytes_of(std::vector<float>{1, 1, 9, 5, -5, 2, 99, 3, 0, 0, 0, 0}),
             bytes_of(std::vector<float>{0.9f, 0.8f, 0.7f}), bytes_of(std::vector<std::int32_t>{1, second, 77})}};
        const Folder folder;
        const Manifest read = parse_manifest(json.dump());
        Detector detector(read, open_recording(folder.write("r", recording_of(json, {one})), read));
        return detector.detect(image(0)).get().detections;
    };
    const auto found = with(2, 0);
    REQUIRE(found.size() == 2);
    CHECK(found[0].class_index == 1);
    CHECK(found[1].score == 0.8f);
    CHECK(found[1].box.x1 == 0);
    CHECK(found[1].box.x2 == 16);
    CHECK(with(0, 0).empty());
    CHECK_THROWS_WITH(with(4, 0), Contains("tells of 4 detections, and has room for 3"));
    CHECK_THROWS_WITH(with(-1, 0), Contains("tells of -1 detections"));
    CHECK_THROWS_WITH(with(2, 2), Contains("tells of class 2, and there are 2"));
}

TEST_CASE("masks lie in the image's own pixels") {
    const Json json = masks_manifest_json();
    const std::vector<float> boxes{2, 2, 6, 6, -5, 2, 99, 3, 0, 0, 0, 0};
    const std::vector<float> masks{1, 1, 1, 1, 1, 0, 1, 0, 9, 9, 9, 9};
    const Recorded one{
        0,
        {bytes_of(std::vector<std::int32_t>{2}), bytes_of(boxes), bytes_of(std::vector<float>{0.9F, 0.8F, 0.7F}),
         bytes_of(std::vector<std::int32_t>{1, 0, 0}), bytes_of(masks)}};
    const Folder folder;
    const Manifest read = parse_manifest(json.dump());
    const auto engine_of = [&](const Json& what) {
        return open_recording(folder.write("r", recording_of(what, {one})), parse_manifest(what.dump()));
    };
    Detector detector(read, engine_of(json));
    // Twice as large in each direction as the network's input: the box is 4 4 12 12 in it.
    const Found found = detector.detect(image(0, 32, 16)).get();
    REQUIRE(found.detections.size() == 2);
    CHECK(found.masks.side == 2);
    CHECK(found.masks.probabilities == std::vector<float>(masks.begin(), masks.begin() + 8));
    const RunLengths mask = found.mask(0);
    CHECK(mask.width == 32);
    CHECK(mask.height == 16);
    CHECK(mask.runs == paste_mask(found.masks[0], {4, 4, 12, 12}, 32, 16).runs);
    CHECK(mask.pixels()[8 * 32 + 8] == 1);
    CHECK(mask.pixels()[8 * 32 + 16] == 0);
    CHECK(found.mask(1).area() > 0);
    CHECK_THROWS_WITH(found.mask(2), Contains("2 detections and no mask of number 2"));
    // As the network takes it: in pixels of its input.
    std::promise<Found> promise;
    detector.detect_input(std::vector<float>(3 * 8 * 16), Clock::time_point::max(), [&](Outcome outcome) {
        promise.set_value(std::move(outcome.found));
    });
    const Found placed = promise.get_future().get();
    CHECK(placed.mask(0).runs == paste_mask(found.masks[0], {2, 2, 6, 6}, 16, 8).runs);

    Json without = json;
    without.erase("masks");
    Detector boxes_alone(parse_manifest(without.dump()), engine_of(without));
    CHECK_THROWS_WITH(boxes_alone.detect(image(0)).get().mask(0), Contains("the bundle has no masks"));
    Json fewer = json;
    fewer["outputs"][4]["shape"][1] = 2;
    const Recorded short_one{
        0, {one.outputs[0], one.outputs[1], one.outputs[2], one.outputs[3], one.outputs[4].substr(0, 32)}};
    const Manifest of_fewer = parse_manifest(fewer.dump());
    const auto engine = open_recording(folder.write("s", recording_of(fewer, {short_one})), of_fewer);
    CHECK_THROWS_WITH(Detector(of_fewer, engine), Contains("'masks' has shape Bx2x2x2"));
}

TEST_CASE("what belongs to a box follows it into the image's own pixels") {
    // The second candidate is suppressed by the third, which is better.
    const std::vector<float> boxes{0, 0, 4, 4, 8, 2, 14, 6, 8, 2, 14, 6};
    const std::vector<float> scores{0.5F, 0, 0, 0.7F, 0, 0.8F};
    const std::vector<float> coefficients{1, 0, 9, 9, 0, 1};
    const std::vector<float> prototypes{1, 1, 1, 1, 1, 1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1};
    const std::vector<float> keypoints{1, 2, 0.5F, 3, 4, 0.25F, 9, 9, 9, 9, 9, 9, 10, 3, 0.75F, 40, -7, 1};
    const std::vector<float> rotated{2, 2, 4, 4, 0, 11, 4, 6, 4, 0.5F, 11, 4, 6, 4, 0.5F};
    const Recorded one{
        0,
        {bytes_of(boxes), bytes_of(scores), bytes_of(coefficients), bytes_of(prototypes), bytes_of(keypoints),
         bytes_of(rotated)}};
    const Folder folder;
    const auto detector_of = [&](const Json& json, const Recorded& outputs) {
        const Manifest read = parse_manifest(json.dump());
        return std::make_unique<Detector>(read, open_recording(folder.write("r", recording_of(json, {outputs})), read));
    };
    const auto check = [&](Detector& detector) {
        // Twice as large in each direction as the network's input.
        const Found found = detector.detect(image(0, 32, 16)).get();
        REQUIRE(found.detections.size() == 2);
        CHECK(found.detections[0].class_index == 1);
        CHECK(found.detections[0].box.x1 == 16);
        REQUIRE(found.keypoints.size() == 4);
        CHECK((found.keypoints[0].x == 20 && found.keypoints[0].y == 6 && found.keypoints[0].score == 0.75F));
        // Within the image.
        CHECK((found.keypoints[1].x == 32 && found.keypoints[1].y == 0 && found.keypoints[1].score == 1));
        CHECK((found.keypoints[3].x == 6 && found.keypoints[3].y == 8 && found.keypoints[3].score == 0.25F));
        REQUIRE(found.rotated_boxes.size() == 2);
        CHECK((found.rotated_boxes[0].x == 22 && found.rotated_boxes[0].y == 8));
        CHECK(found.rotated_boxes[0].width == Approx(12));
        CHECK(found.rotated_boxes[0].height == Approx(8));
        CHECK(found.rotated_boxes[0].angle == Approx(0.5));
        CHECK(found.rotated_boxes[1].width == Approx(8));
        CHECK(found.prototype_masks.coefficients == std::vector<float>{0, 1, 1, 0});
        CHECK(found.prototype_masks.prototypes == prototypes);
        // The box is 16 4 28 12, and all of the right half belongs to the second prototype.
        const auto mask = found.mask(0);
        CHECK((mask.width == 32 && mask.height == 16));
        CHECK(mask.area() == 12 * 8);
        CHECK(found.mask(1).area() == 8 * 8);
        CHECK_THROWS_WITH(found.mask(2), Contains("2 detections and no mask of number 2"));

        // As the network takes it: in pixels of its input, not clipped to it.
        std::promise<Found> promise;
        detector.detect_input(std::vector<float>(3 * 8 * 16), Clock::time_point::max(), [&](Outcome outcome) {
            promise.set_value(std::move(outcome.found));
        });
        const Found placed = promise.get_future().get();
        REQUIRE(placed.detections.size() == 2);
        CHECK(placed.mask(0).area() == 6 * 4);
        CHECK((placed.keypoints[1].x == 40 && placed.keypoints[1].y == -7));
        CHECK((placed.rotated_boxes[0].x == 11 && placed.rotated_boxes[0].angle == 0.5F));
    };
    const Json json = parts_manifest_json();
    check(*detector_of(json, one));

    // The same where the network has suppressed: the rows are those of the detections.
    Json native = json;
    native["nms"]["where"] = "native";
    native["outputs"][1]["shape"] = {"batch", 3};
    native["outputs"].push_back({{"name", "num_dets"}, {"dtype", "int32"}, {"shape", {"batch", 1}}});
    native["outputs"].push_back({{"name", "classes"}, {"dtype", "int32"}, {"shape", {"batch", 3}}});
    const auto swapped = [](std::vector<float> rows) {
        const auto width = static_cast<std::ptrdiff_t>(rows.size() / 3);
        std::rotate(rows.begin(), rows.begin() + 2 * width, rows.end());
        return bytes_of(rows);
    };
    const Recorded suppressed{
        0,
        {swapped(boxes), bytes_of(std::vector<float>{0.8F, 0.5F, 0}), swapped(coefficients), bytes_of(prototypes),
         swapped(keypoints), swapped(rotated), bytes_of(std::vector<std::int32_t>{2}),
         bytes_of(std::vector<std::int32_t>{1, 0, 0})}};
    check(*detector_of(native, suppressed));

    // The engine must give them as the manifest says.
    const auto refused = [&](std::size_t index, const Json& shape, std::size_t values) {
        Json other = json;
        other["outputs"][index]["shape"] = shape;
        Recorded outputs = one;
        outputs.outputs[index].resize(values * sizeof(float));
        try {
            const Manifest wrong = parse_manifest(other.dump());
            const auto engine = open_recording(folder.write("w", recording_of(other, {outputs})), wrong);
            Detector(wrong, engine);
        } catch (const EngineError& error) {
            return std::string(error.what());
        }
        return std::string("it was taken");
    };
    CHECK_THAT(refused(2, {"b", 2, 2}, 4), Contains("'mask_coefficients' has shape Bx2x2"));
    CHECK_THAT(refused(4, {"b", 2, 2, 3}, 12), Contains("'keypoints' has shape Bx2x2x3"));
    CHECK_THAT(refused(5, {"b", 2, 5}, 10), Contains("'rotated_boxes' has shape Bx2x5"));
}

TEST_CASE("outputs that are not the manifest's are refused before anything runs") {
    const auto refused = [](const std::string& pointer, const Json& value) {
        Json json = manifest_json();
        json[Json::json_pointer(pointer)] = value;
        const std::string bytes(6 * 4, '\0');
        try {
            const Folder folder;
            const Manifest read = parse_manifest(json.dump());
            const Recorded one{0, {std::string(48, '\0'), bytes}};
            Detector(read, open_recording(folder.write("r", recording_of(json, {one})), read));
        } catch (const EngineError& error) {
            return std::string(error.what());
        }
        return std::string("they were taken");
    };
    CHECK_THAT(refused("/outputs/1/name", "logits"), Contains("the engine has no output 'scores'"));
    CHECK_THAT(refused("/outputs/1/shape", {"b", 2, 3}), Contains("'scores' has shape Bx2x3"));
    CHECK_THAT(refused("/outputs/1/dtype", "int32"), Contains("or a type that is not what"));
    CHECK_THAT(refused("/model/classes", {"cat"}), Contains("Bx3x1"));
}
