#include "trtdet/bundle.hpp"

#include <catch2/catch.hpp>

#include "bundles.hpp"
#include "trtdet/errors.hpp"

using namespace trtdet;
using namespace trtdet::tests;
using Catch::Matchers::Contains;

namespace {

// The manifest with something at a JSON pointer replaced.
std::string with(const std::string& pointer, const Json& value) {
    Json manifest = manifest_json();
    manifest[Json::json_pointer(pointer)] = value;
    return manifest.dump();
}

std::string without(const std::string& pointer, const std::string& key) {
    Json manifest = manifest_json();
    manifest[Json::json_pointer(pointer)].erase(key);
    return manifest.dump();
}

std::string refusal(const std::string& manifest) {
    try {
        parse_manifest(manifest);
    } catch (const BundleError& error) {
        return error.what();
    }
    return "it was taken";
}

const std::string hash(64, 'a');

}  // namespace

TEST_CASE("a manifest is read") {
    const Manifest manifest = parse_manifest(manifest_json().dump());
    CHECK(manifest.model_name == "small");
    CHECK(manifest.classes == std::vector<std::string>{"cat", "dog"});
    CHECK(manifest.input.name == "images");
    CHECK(manifest.input.min_batch == 1);
    CHECK(manifest.input.opt_batch == 2);
    CHECK(manifest.input.max_batch == 4);
    CHECK(manifest.input.preprocess.height == 8);
    CHECK(manifest.input.preprocess.width == 16);
    CHECK(manifest.input.preprocess.resize == Resize::stretch);
    CHECK(manifest.outputs.at(1).shape == std::vector<std::int64_t>{-1, 3, 2});
    CHECK(manifest.nms.score_threshold == 0.1f);
    CHECK_FALSE(manifest.nms.logits);
    CHECK(manifest.backend.sms == std::vector<int>{86});
    CHECK_FALSE(manifest.backend.hardware_compatible);
}

TEST_CASE("keys that came later may be missing or unknown") {
    Json manifest = manifest_json();
    manifest["nms"].erase("scores");
    manifest["later"] = {{"than", "this"}};
    manifest["input"]["also"] = 1;
    CHECK_FALSE(parse_manifest(manifest.dump()).nms.logits);
    manifest["nms"]["scores"] = "logits";
    manifest["backend"]["hardware_compatible"] = true;
    manifest["backend"]["dla"] = nullptr;
    CHECK(parse_manifest(manifest.dump()).nms.logits);
    CHECK(parse_manifest(manifest.dump()).backend.hardware_compatible);
    CHECK(parse_manifest(manifest.dump()).backend.dla == -1);
    manifest["backend"]["dla"] = 1;
    CHECK(parse_manifest(manifest.dump()).backend.dla == 1);
}

TEST_CASE("a fixed batch is the batch all the same") {
    CHECK(
        parse_manifest(with("/outputs/0/shape", {1, 3, 4})).outputs.at(0).shape == std::vector<std::int64_t>{-1, 3, 4});
}

TEST_CASE("what a manifest cannot be is named by its key") {
    CHECK_THAT(refusal("{"), Contains("manifest.json is not JSON"));
    CHECK_THAT(refusal("[]"), Contains("is a array, expected an object"));
    CHECK_THAT(refusal(without("", "schema")), Contains("'schema' is missing"));
    CHECK_THAT(refusal(with("/schema", 3)), Contains("'schema' is 3, and this libtrtdet reads 1 and 2"));
    CHECK_THAT(refusal(with("/schema", 4294967297)), Contains("'schema' is 4294967297"));
    CHECK_THAT(refusal(with("/schema", 1e300)), Contains("'schema' is 1e+300"));
    CHECK_THAT(refusal(without("/input", "shape")), Contains("'input.shape' is missing"));
    CHECK_THAT(refusal(with("/input/shape/min", {1, 3, 8})), Contains("'input.shape.min' has 3 entries, expected 4"));
    CHECK_THAT(
        refusal(with("/input/shape/min/0", 5)), Contains("'input.shape.opt.0' is 2, expected an integer from 5"));
    CHECK_THAT(
        refusal(with("/input/shape/max/1", 4)), Contains("'input.shape.max.1' is 4, expected an integer from 3 to 3"));
    CHECK_THAT(
        refusal(with("/input/dtype", "float16")), Contains("'input.dtype' is 'float16', expected one of float32"));
    CHECK_THAT(
        refusal(with("/input/preprocess/resize", "crop")), Contains("letterbox-topleft, letterbox-centre, stretch"));
    CHECK_THAT(refusal(with("/input/preprocess/scale", 0)), Contains("'input.preprocess.scale' is 0"));
    CHECK_THAT(refusal(with("/input/preprocess/std/1", -1)), Contains("'input.preprocess.std.1' is -1"));
    CHECK_THAT(refusal(with("/input/preprocess/pad_value", 256)), Contains("expected an integer from 0 to 255"));
    CHECK_THAT(refusal(with("/input/preprocess/size/0", 1e9)), Contains("expected an integer"));
    CHECK_THAT(refusal(with("/outputs/0/shape", {"b", 1 << 30, 4})), Contains("more than 2^30 elements"));
    CHECK_THAT(refusal(with("/outputs/0/shape", {"b", "n", 4})), Contains("'outputs.0.shape.1' is \"n\""));
    CHECK_THAT(refusal(with("/outputs/0/shape", Json::array())), Contains("has 0 dimensions"));
    CHECK_THAT(refusal(with("/nms/score_threshold", 1.5)), Contains("'nms.score_threshold' is 1.5"));
    CHECK_THAT(
        refusal(with("/nms/max_detections", 18446744073709551615u)), Contains("'nms.max_detections' is 18446744"));
    CHECK_THAT(refusal(with("/model/classes", {1})), Contains("'model.classes.0' is a number, expected a string"));
    CHECK_THAT(refusal(with("/backend/sms", "86")), Contains("'backend.sms' is a string, expected a list"));
}

TEST_CASE("masks are those of detections, in an output that there is") {
    CHECK_FALSE(parse_manifest(manifest_json().dump()).masks);
    CHECK_FALSE(parse_manifest(with("/masks", nullptr)).masks);
    const Json json = masks_manifest_json();
    const Manifest manifest = parse_manifest(json.dump());
    REQUIRE(manifest.masks);
    CHECK(manifest.masks->output == "masks");
    CHECK(manifest.masks->size == 2);
    CHECK(manifest.masks->threshold == 0.5F);
    const auto refused = [&](const std::string& pointer, const Json& value) {
        Json changed = json;
        changed[Json::json_pointer(pointer)] = value;
        return refusal(changed.dump());
    };
    CHECK_THAT(refused("/masks", 3), Contains("'masks' is a number, expected an object"));
    CHECK_THAT(refused("/masks", Json::object()), Contains("'masks.output' is missing"));
    CHECK_THAT(
        refused("/masks/output", "mask"), Contains("'masks.output' names 'mask', which 'outputs' does not have"));
    CHECK_THAT(refused("/masks/size", 3), Contains("is not float32 (batch, detections, 3, 3)"));
    CHECK_THAT(refused("/masks/size", 0), Contains("'masks.size' is 0, expected an integer from 1 to 1024"));
    CHECK_THAT(refused("/masks/threshold", 1.5), Contains("'masks.threshold' is 1.5"));
    CHECK_THAT(refused("/outputs/4/shape", {"b", 3, 2}), Contains("is not float32"));
    CHECK_THAT(refused("/outputs/4/dtype", "float16"), Contains("is not float32"));
    CHECK_THAT(refused("/nms/where", "host"), Contains("'masks' stands beside 'nms.where', which is host"));
}

TEST_CASE("what a one-stage detector gives beside boxes") {
    const Json json = parts_manifest_json();
    const PartSpecs parts = parse_manifest(json.dump()).parts;
    REQUIRE(parts.masks);
    CHECK(parts.masks->coefficients == "mask_coefficients");
    CHECK(parts.masks->prototypes == "prototypes");
    CHECK(parts.masks->count == 2);
    CHECK(parts.masks->height == 2);
    CHECK(parts.masks->width == 4);
    CHECK(parts.masks->threshold == 0.5);
    REQUIRE(parts.keypoints);
    CHECK(parts.keypoints->output == "keypoints");
    CHECK(parts.keypoints->names == std::vector<std::string>{"head", "tail"});
    CHECK(parts.keypoints->sigmas == std::vector<double>{0.5, 0.25});
    CHECK(parts.keypoints->skeleton == std::vector<std::pair<int, int>>{{0, 1}});
    REQUIRE(parts.rotated_boxes);
    CHECK(parts.rotated_boxes->output == "rotated_boxes");
    CHECK_FALSE(parse_manifest(manifest_json().dump()).parts.masks);

    // One of them is enough, and what is absent may be null.
    Json some = json;
    some["parts"].erase("masks");
    some["parts"]["rotated_boxes"] = nullptr;
    some["parts"]["keypoints"].erase("skeleton");
    const PartSpecs fewer = parse_manifest(some.dump()).parts;
    CHECK_FALSE(fewer.masks);
    CHECK_FALSE(fewer.rotated_boxes);
    REQUIRE(fewer.keypoints);
    CHECK(fewer.keypoints->skeleton.empty());
}

TEST_CASE("parts that cannot be read are named by their key") {
    const auto refused = [](const std::string& pointer, const Json& value) {
        Json changed = parts_manifest_json();
        changed[Json::json_pointer(pointer)] = value;
        return refusal(changed.dump());
    };
    CHECK_THAT(refused("/schema", 1), Contains("'parts' belongs to schema 2, and 'schema' is 1"));
    CHECK_THAT(refusal(with("/schema", 2)), Contains("'parts' is missing"));
    CHECK_THAT(
        refused("/parts/depth", Json::object()),
        Contains("'parts' has the key 'depth', and this libtrtdet reads masks, keypoints, rotated_boxes"));
    CHECK_THAT(
        refused("/parts/masks/scale", 2),
        Contains("'parts.masks' has the key 'scale', and this libtrtdet reads coefficients, prototypes, threshold"));
    CHECK_THAT(refused("/parts/keypoints/units", "pixels"), Contains("'parts.keypoints' has the key 'units'"));
    CHECK_THAT(refused("/parts/rotated_boxes/angle", "degrees"), Contains("'parts.rotated_boxes' has the key 'angle'"));
    CHECK_THAT(refused("/parts", Json::object()), Contains("has none of masks, keypoints and rotated_boxes"));
    CHECK_THAT(refused("/parts", 3), Contains("'parts' is a number, expected an object"));
    CHECK_THAT(
        refused("/parts/masks/prototypes", "cells"),
        Contains("'parts.masks.prototypes' names 'cells', which 'outputs'"));
    CHECK_THAT(
        refused("/parts/masks/coefficients", "keypoints"), Contains("is not float32 (batch, rows, coefficients)"));
    CHECK_THAT(refused("/outputs/3/shape", {"b", 3, 2, 4}), Contains("2 coefficients and 3 prototypes of 2 x 4 cells"));
    CHECK_THAT(
        refused("/parts/masks/threshold", 1), Contains("'parts.masks.threshold' is 1, expected a number between"));
    CHECK_THAT(
        refused("/parts/masks/threshold", 0), Contains("'parts.masks.threshold' is 0, expected a number between"));
    CHECK_THAT(refused("/parts/keypoints/names", Json::array()), Contains("'parts.keypoints.names' has 0 entries"));
    CHECK_THAT(
        refused("/parts/keypoints/sigmas", {0.5}), Contains("'parts.keypoints.sigmas' has 1 entries, expected 2"));
    CHECK_THAT(refused("/parts/keypoints/sigmas/0", 0), Contains("'parts.keypoints.sigmas.0' is 0"));
    CHECK_THAT(
        refused("/parts/keypoints/skeleton/0/1", 2),
        Contains("'parts.keypoints.skeleton.0.1' is 2, expected an integer from 0 to 1"));
    CHECK_THAT(refused("/outputs/4/shape", {"b", 3, 3, 3}), Contains("is not float32 (batch, rows, 2, 3)"));
    CHECK_THAT(refused("/outputs/4/dtype", "int32"), Contains("is not float32 (batch, rows, 2, 3)"));
    CHECK_THAT(refused("/outputs/5/shape", {"b", 3, 4}), Contains("is not float32 (batch, rows, 5)"));
    Json both = parts_manifest_json();
    both["nms"]["where"] = "native";
    both["outputs"].push_back({{"name", "masks"}, {"dtype", "float32"}, {"shape", {"b", 3, 2, 2}}});
    both["masks"] = {{"output", "masks"}, {"size", 2}, {"threshold", 0.5}};
    CHECK_THAT(refusal(both.dump()), Contains("'parts' stands beside 'masks'"));
}

TEST_CASE("a manifest does not reach out of its folder") {
    for (const std::string name : {"../engine", "/etc/passwd", "a/b", "..", ".", ""}) {
        INFO(name);
        CHECK_THAT(
            refusal(with("/files", {{name, hash}})), Contains("expected the name of a file in the bundle's folder"));
    }
    CHECK_THAT(refusal(with("/files", {{"model.engine", "123"}})), Contains("expected 64 hexadecimal digits"));
}

TEST_CASE("a plugin has the hash of its file") {
    Json manifest = manifest_json();
    manifest["files"] = {{"libp.so", hash}};
    manifest["backend"]["plugins"] = {{{"file", "libp.so"}, {"sha256", hash}}};
    CHECK(parse_manifest(manifest.dump()).backend.plugins.at(0).file == "libp.so");
    manifest["backend"]["plugins"][0]["sha256"] = std::string(64, 'b');
    CHECK_THAT(refusal(manifest.dump()), Contains("'backend.plugins.0.sha256' is not what 'files' has for 'libp.so'"));
    manifest["files"] = Json::object();
    CHECK_THAT(refusal(manifest.dump()), Contains("is not what 'files' has"));
}

TEST_CASE("what is odd in a message is escaped") {
    CHECK_THAT(refusal(with("/input/dtype", "a\nb\x01\xc3\xa9")), Contains("'a\\x0ab\\x01\\xc3\\xa9'"));
    CHECK_THAT(refusal(with("/input/dtype", std::string(5000, 'x'))), Contains("xxx...'"));
}

TEST_CASE("a bundle is verified before it is used") {
    const Folder folder;
    write_bundle(folder, manifest_json(), {{"model.engine", "engine"}, {"int8.onnx", "model"}});
    const Bundle bundle = Bundle::open(folder.path());
    CHECK(bundle.read("model.engine") == std::vector<char>{'e', 'n', 'g', 'i', 'n', 'e'});
    CHECK(bundle.file("int8.onnx") == folder.path() / "int8.onnx");
    CHECK_THROWS_WITH(bundle.file("plan.json"), Contains("has no 'plan.json'; it holds int8.onnx, model.engine"));

    SECTION("a byte that changed") {
        folder.write("model.engine", "engina");
        CHECK_THROWS_WITH(Bundle::open(folder.path()), Contains("'model.engine' was altered: sha256 "));
        CHECK_THROWS_WITH(bundle.read("model.engine"), Contains("'model.engine' was altered"));
    }
    SECTION("a file that is gone") {
        std::filesystem::remove(folder.path() / "int8.onnx");
        CHECK_THROWS_WITH(Bundle::open(folder.path()), Contains("int8.onnx' cannot be read"));
    }
    SECTION("a folder in place of a file") {
        std::filesystem::remove(folder.path() / "int8.onnx");
        std::filesystem::create_directory(folder.path() / "int8.onnx");
        CHECK_THROWS_AS(Bundle::open(folder.path()), BundleError);
    }
    SECTION("no manifest") {
        std::filesystem::remove(folder.path() / "manifest.json");
        CHECK_THROWS_WITH(Bundle::open(folder.path()), Contains("is not a bundle") && Contains("trtdet build"));
    }
}

// Written by Python's cryptography 46 with the secret key of test 1 in section 7.1 of RFC 8032.
const std::string public_key =
    "-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEA11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=\n"
    "-----END PUBLIC KEY-----\n";

TEST_CASE("a bundle is what its key signed") {
    const Folder folder;
    write_bundle(folder, manifest_json(), {{"model.engine", "engine"}, {"int8.onnx", "model"}});
    const auto key = folder.write("public.pem", public_key);
    CHECK_THROWS_WITH(Bundle::open(folder.path(), key), Contains("is not signed; sign it with 'trtdet sign'"));
    folder.write("manifest.sig", std::string(64, '\0'));
    CHECK_THROWS_WITH(
        Bundle::open(folder.path(), key), Contains("is not signed by the key of '") && Contains("altered"));
    folder.write("manifest.sig", "");
    CHECK_THROWS_AS(Bundle::open(folder.path(), key), BundleError);
    CHECK_THROWS_WITH(Bundle::open(folder.path(), folder.path() / "absent.pem"), Contains("cannot be read"));
    CHECK_THROWS_WITH(
        Bundle::open(folder.path(), folder.write("text.pem", "no key")),
        Contains("is not a public Ed25519 key in PEM"));
    CHECK_NOTHROW(Bundle::open(folder.path()));
}

TEST_CASE("a large file is hashed whole") {
    const Folder folder;
    std::string text(3'000'001, 'x');
    const std::string before = sha256_file(folder.write("large", text));
    text.back() = 'y';
    CHECK(before != sha256_file(folder.write("large", text)));
    CHECK(
        sha256_file(folder.write("abc", "abc")) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(sha256_file(folder.write("none", "")) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}
