#include "trtdet/engine.hpp"

#include <catch2/catch.hpp>
#include <cstring>

#include "bundles.hpp"
#include "trtdet/errors.hpp"
#include "trtdet/recording.hpp"

using namespace trtdet;
using namespace trtdet::tests;
using Catch::Matchers::Contains;

namespace {

BackendSpec built() {
    BackendSpec backend;
    backend.name = "tensorrt";
    backend.version = "10.9.0.34";
    backend.sms = {80, 86};
    return backend;
}

Machine machine() {
    return {"tensorrt", "10.9.0", {{0, "Old", 75}, {1, "Fits", 86}, {2, "New", 120}}};
}

std::string outputs(float score) {
    return bytes_of(std::vector<float>{score, 0, 0, 0, 0, 0});
}

const std::string boxes = bytes_of(std::vector<float>(12, 1.0f));

std::vector<Recorded> images() {
    return {{10, {boxes, outputs(0.1f)}}, {20, {boxes, outputs(0.2f)}}};
}

std::string refusal_of(const std::string& recording) {
    const Folder folder;
    try {
        open_recording(folder.write("r", recording), parse_manifest(manifest_json().dump()));
    } catch (const EngineError& error) {
        return error.what();
    }
    return "it was taken";
}

std::string changed(const Json& changes) {
    return refusal_of(recording_of(manifest_json(), images(), changes));
}

}  // namespace

TEST_CASE("an engine runs on what it was built for") {
    CHECK(fitting_device(built(), machine()) == 1);
    CHECK(fitting_device(built(), machine(), 1) == 1);

    SECTION("hardware compatible ones from Ampere on") {
        BackendSpec backend = built();
        backend.sms = {89};
        CHECK_THROWS_WITH(
            fitting_device(backend, machine()), Contains("compute capability 8.9, and this machine has Old with 7.5, "
                                                         "Fits with 8.6, New with 12.0; build it again"));
        backend.hardware_compatible = true;
        CHECK(fitting_device(backend, machine()) == 1);
    }
    SECTION("the device that is chosen, and no other") {
        BackendSpec backend = built();
        CHECK_THROWS_WITH(
            fitting_device(backend, machine(), 0),
            Contains("8.0 or 8.6, and the device that was chosen is Old with 7.5; build it again"));
        CHECK_THROWS_WITH(
            fitting_device(backend, machine(), 3),
            Contains("cannot be run on CUDA device 3, as this machine has 3, counted from 0"));
        backend.hardware_compatible = true;
        CHECK(fitting_device(backend, machine(), 2) == 2);
    }
    SECTION("no device") {
        Machine bare = machine();
        bare.devices.clear();
        CHECK_THROWS_WITH(fitting_device(built(), bare), Contains("8.0 or 8.6, and this machine has no CUDA device"));
    }
    SECTION("another version") {
        BackendSpec backend = built();
        backend.version = "10.8.0";
        CHECK_THROWS_WITH(
            fitting_device(backend, machine()), Contains("built with tensorrt 10.8.0, and 10.9.0 is installed"));
        backend.version_compatible = true;
        CHECK(fitting_device(backend, machine()) == 1);
        backend.version = "10.10.0";
        CHECK_THROWS_WITH(fitting_device(backend, machine()), Contains("10.10.0 for that version and later"));
    }
    SECTION("another library") {
        BackendSpec backend = built();
        backend.name = "tensorrt-rtx";
        CHECK_THROWS_WITH(
            fitting_device(backend, machine()), Contains("built with tensorrt-rtx, and tensorrt is what is here"));
    }
}

TEST_CASE("a recording gives what was recorded for the nearest image") {
    const Folder folder;
    const Manifest manifest = parse_manifest(manifest_json().dump());
    const auto engine = open_recording(folder.write("r", recording_of(manifest_json(), images())), manifest);
    CHECK(engine->max_batch() == 4);
    CHECK(engine->ran_on() == "a recording of 2 images");
    const auto lane = engine->new_lane();
    const std::size_t pixels = 3 * 8 * 16;
    std::fill_n(lane->input().data(), pixels, 20.5f);
    std::fill_n(lane->input().data() + pixels, pixels, 9.5f);
    lane->run(2);
    const auto scores = lane->output(1).as<float>();
    CHECK(scores[0] == 0.2f);
    CHECK(scores[6] == 0.1f);

    std::fill_n(lane->input().data(), pixels, 15.0f);
    CHECK_THROWS_WITH(lane->run(1), Contains("no image within 1 grey level"));
    std::fill_n(lane->input().data(), pixels, std::numeric_limits<float>::quiet_NaN());
    CHECK_THROWS_AS(lane->run(1), EngineError);
    CHECK_THROWS_WITH(lane->run(5), Contains("a batch of 1 to 4, not of 5"));
    CHECK_THROWS_WITH(lane->run(0), Contains("not of 0"));
}

TEST_CASE("a recording makes images that it knows") {
    Json json = manifest_json();
    json["input"]["preprocess"].update(
        {{"color", "bgr"}, {"scale", 0.5}, {"mean", {1.0, 2.0, 3.0}}, {"std", {2.0, 1.0, 4.0}}});
    const Manifest manifest = parse_manifest(json.dump());
    const Folder folder;
    const auto file = folder.write("r", recording_of(json, images()));
    const auto made = recorded_images(file, manifest, 5);
    REQUIRE(made.size() == 2);
    CHECK(recorded_images(file, manifest, 1).size() == 1);
    // A number of 10 in each channel, the first of which is blue.
    CHECK(
        std::vector<std::uint8_t>(made[0].pixels.begin(), made[0].pixels.begin() + 3) ==
        std::vector<std::uint8_t>{86, 24, 42});
    const auto lane = open_recording(file, manifest)->new_lane();
    for (std::size_t index = 0; index < made.size(); ++index) {
        preprocess(made[index], manifest.input.preprocess, lane->input().data());
        lane->run(1);
        CHECK(lane->output(1).as<float>()[0] == 0.1f * static_cast<float>(index + 1));
    }
}

TEST_CASE("what a lane reads and writes has a size and a type") {
    const Folder folder;
    const Manifest manifest = parse_manifest(manifest_json().dump());
    const auto lane = open_recording(folder.write("r", recording_of(manifest_json(), images())), manifest)->new_lane();
    CHECK(lane->input().size() == 4 * 3 * 8 * 16);
    CHECK(lane->output(0).as<float>().size() == 4 * 3 * 4);
    CHECK(lane->output(1).dtype() == DType::float32);
    CHECK(lane->output(1).bytes().size() == 4 * 3 * 2 * sizeof(float));
    CHECK_THROWS_AS(lane->output(1).as<std::int32_t>(), EngineError);
}

TEST_CASE("a recording outlives its file") {
    const Folder folder;
    const auto file = folder.write("r", recording_of(manifest_json(), images()));
    const auto engine = open_recording(file, parse_manifest(manifest_json().dump()));
    auto lane = engine->new_lane();
    std::filesystem::remove(file);
    std::fill_n(lane->input().data(), 3 * 8 * 16, 10.0f);
    lane->run(1);
    CHECK(lane->output(1).as<float>()[0] == 0.1f);
}

TEST_CASE("a damaged recording is refused with a reason") {
    CHECK_THAT(refusal_of(""), Contains("cannot be read"));
    CHECK_THAT(refusal_of("short"), Contains("cannot be read"));
    CHECK_THAT(refusal_of(std::string(16, '\xff')), Contains("is cut short or none"));
    const std::string whole = recording_of(manifest_json(), images());
    CHECK_THAT(refusal_of(whole.substr(0, whole.size() - 1)), Contains("'outputs.scores' is not within it"));
    CHECK_THAT(refusal_of(whole.substr(0, 100)), Contains("is cut short or none"));
    CHECK_THAT(changed({{"__metadata__", {{"format", "other"}}}}), Contains("none of format trtdet-recording-1"));
    CHECK_THAT(changed({{"__metadata__", {{"content_hash", "other"}}}}), Contains("made from another bundle"));
    CHECK_THAT(changed({{"fingerprints", nullptr}}), Contains("holds no image"));
    CHECK_THAT(changed({{"fingerprints", {{"shape", {0, 3, 8, 16}}}}}), Contains("holds no image"));
    CHECK_THAT(changed({{"fingerprints", {{"shape", {3, 3, 8, 16}}}}}), Contains("'fingerprints' is not within it"));
    CHECK_THAT(changed({{"outputs.boxes", nullptr}}), Contains("lacks the tensor 'outputs.boxes'"));
    CHECK_THAT(changed({{"outputs.boxes", {{"dtype", "F16"}}}}), Contains("'outputs.boxes' as another type than F32"));
    CHECK_THAT(
        changed({{"outputs.boxes", {{"shape", {2, 12}}}}}), Contains("'outputs.boxes' in another shape than [2,3,4]"));
    CHECK_THAT(changed({{"outputs.boxes", {{"data_offsets", {96, 0}}}}}), Contains("'outputs.boxes' is not within it"));
    CHECK_THAT(changed({{"outputs.boxes", {{"data_offsets", {-1, 95}}}}}), Contains("does not say where"));
    CHECK_THROWS_AS(open_recording("/nowhere", parse_manifest(manifest_json().dump())), EngineError);
}
