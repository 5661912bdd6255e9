// The parts of trtdet-serve that need no socket.
#include <atomic>
#include <catch2/catch.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <future>
#include <limits>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <thread>

#include "bundles.hpp"
#include "clients.hpp"
#include "heap_meter.hpp"
#include "images.hpp"
#include "inference_request.hpp"
#include "log.hpp"
#include "memory_budget.hpp"
#include "metrics.hpp"
#include "multipart.hpp"
#include "service.hpp"
#include "spare_memory.hpp"
#include "trtdet/cores.hpp"
#include "trtdet/errors.hpp"
#include "workers.hpp"

using namespace trtdet;
using namespace trtdet::serve;
using namespace trtdet::tests;
using Catch::Matchers::Contains;
using namespace std::chrono_literals;

namespace {

std::string part(const std::string& boundary, const std::string& headers, const std::string& data) {
    return "--" + boundary + "\r\n" + headers + "\r\n\r\n" + data + "\r\n";
}

const std::string file_header = "Content-Disposition: form-data; name=\"image\"; filename=\"a.jpg\"";

// A network that finds two boxes in every image, waits where it is told to, and fails where it is told to.
class FakeEngine : public Engine {
public:
    explicit FakeEngine(const Manifest& manifest) : outputs_(manifest.outputs) {}

    const std::vector<OutputSpec>& outputs() const override { return outputs_; }
    int min_batch() const override { return 1; }
    int opt_batch() const override { return 1; }
    int max_batch() const override { return 1; }
    std::string ran_on() const override { return "nothing"; }
    std::unique_ptr<Lane> new_lane() override { return std::make_unique<FakeLane>(*this); }

    std::atomic<bool> fails{false};
    std::atomic<bool> running{false};  // or was
    std::mutex gate;                   // a run waits for it

private:
    class FakeLane : public Lane {
    public:
        explicit FakeLane(FakeEngine& engine) : engine_(engine), input_(3 * 8 * 16) {}
        Span<float> input() override { return input_; }
        void run(int /*batch*/) override {
            engine_.running = true;
            const std::lock_guard wait(engine_.gate);
            if (engine_.fails) {
                throw EngineError("device 3 at /dev/secret is lost");
            }
        }
        TensorView output(std::size_t index) const override {
            const auto& name = engine_.outputs_[index].name;
            if (name == "num_dets" || name == "classes") {
                return Span<const std::int32_t>(name == "classes" ? classes_ : counts_);
            }
            const bool suppressed = engine_.outputs_[0].name == "num_dets";
            if (const auto part = parts_.find(name); part != parts_.end()) {
                return Span<const float>(part->second);
            }
            return Span<const float>(name == "boxes" ? boxes_ : suppressed ? scores_of_detections_ : scores_);
        }

    private:
        FakeEngine& engine_;
        std::vector<float> input_;
        std::vector<float> boxes_{0, 0, 4, 4, 8.3F, 2, 16, 8, 0, 0, 1, 1};
        std::vector<float> scores_{0.9F, 0, 0, 0.1234567F, 0, 0};
        std::vector<float> scores_of_detections_{0.9F, 0.1234567F, 0};
        std::vector<std::int32_t> counts_{2};
        std::vector<std::int32_t> classes_{0, 1, 0};
        // In the order of boxes.
        std::map<std::string, std::vector<float>> parts_{
            {"masks", {1, 0.75F, 1, 0, 1, 1, 1, 1, 0.5F, 0.5F, 0.5F, 0.5F}},
            {"mask_coefficients", {1, 0, 0, 1, 9, 9}},
            {"prototypes", {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1}},
            {"keypoints", {1, 2, 0.5F, 3, 4, 0.25F, 10, 3, 0.75F, 40, -7, 1, 9, 9, 9, 9, 9, 9}},
            {"rotated_boxes", {2, 2, 4, 4, 0, 12, 5, 7, 5, 0.5F, 9, 9, 9, 9, 9}},
        };
    };

    std::vector<OutputSpec> outputs_;
};

// A service on a fake engine.
struct Serving {
    explicit Serving(ServiceOptions options = {}, DetectorOptions detecting = {}, const Json& json = manifest_json())
        : manifest(parse_manifest(json.dump())) {
        detecting.max_delay = 0us;
        detector = std::make_shared<Detector>(manifest, engine, detecting);
        service.emplace(options, std::vector<ModelSource>{{"small", [this] { return detector; }}}, log, metrics);
    }

    ~Serving() {
        service.reset();
        // A lane may hold the detector still, and cannot be the one to destroy it.
        detector->stop();
    }

    Response call(Request request) {
        if (!request.head.length) {
            request.head.length = request.body.size();
        }
        if (auto refused = service->refuse(request.head)) {
            return *refused;
        }
        return send(std::move(request)).get();
    }

    std::future<Response> send(Request request) {
        if (request.arrived == Clock::time_point()) {
            request.arrived = Clock::now();
        }
        auto promise = std::make_shared<std::promise<Response>>();
        service->handle(std::move(request), [promise](Answer answer) { promise->set_value(answer()); });
        return promise->get_future();
    }

    Response detect(const std::string& body, const std::string& query = "", const std::string& type = "image/png") {
        return call({{"POST", "/v1/detect" + query, type, "", {}, false}, body, {}, nullptr, nullptr});
    }

    Response get(const std::string& target, const std::string& method = "GET") {
        return call({{method, target, "", "", {}, false}, "", {}, nullptr, nullptr});
    }

    Manifest manifest;
    std::shared_ptr<FakeEngine> engine = std::make_shared<FakeEngine>(manifest);
    std::shared_ptr<Detector> detector;
    Log log{Level::error, false};
    Metrics metrics;
    std::optional<Service> service;
};

std::string error_type(const Response& response) {
    return Json::parse(response.body)["error"]["type"];
}
std::string message(const Response& response) {
    return Json::parse(response.body)["error"]["message"];
}

}  // namespace

TEST_CASE("a body in parts is taken apart", "[multipart]") {
    const std::string body = "preamble\r\n" +
                             part("b", file_header + "\r\nContent-Type: image/JPEG; x=y", "one\r\n--bogus") +
                             part("b", "content-disposition: FORM-DATA; name=plain", "") + "--b--\r\nepilogue";
    const auto parts = parse_multipart(body, "b");
    REQUIRE(parts.size() == 2);
    CHECK(parts[0].name == "image");
    CHECK(parts[0].filename == "a.jpg");
    CHECK(parts[0].content_type == "image/jpeg");
    CHECK(parts[0].body == "one\r\n--bogus");
    CHECK(parts[1].name == "plain");
    CHECK(parts[1].filename.empty());
    CHECK(parts[1].content_type.empty());
    CHECK(parts[1].body.empty());
}

TEST_CASE("only a line of its own is a boundary", "[multipart]") {
    const std::string data = "x--b\r\n --b\r\n\r\n--b-\r\n\n--b--\n--b\r";
    const std::string body = part("b", file_header, data) + "--b-- \t";
    const auto parts = parse_multipart(body, "b");
    REQUIRE(parts.size() == 1);
    CHECK(parts[0].body == data);
}

TEST_CASE("names are unquoted as browsers quote them", "[multipart]") {
    const auto name_of = [](const std::string& parameter) {
        return parse_multipart(part("b", "Content-Disposition: form-data; " + parameter, "") + "--b--", "b")[0]
            .filename;
    };
    CHECK(name_of("filename=\"a;b=c.png\"; name=x") == "a;b=c.png");
    CHECK(name_of("filename=\"C:\\dir\\a.png\"") == "C:\\dir\\a.png");
    CHECK(name_of("filename=\"say \\\"hi\\\" \\\\\"") == "say \"hi\" \\");
    CHECK(name_of("filename = token ; name=x") == "token");
}

TEST_CASE("a body that is not multipart is refused", "[multipart]") {
    const auto good = part("b", file_header, "x");
    const std::vector<std::pair<std::string, std::string>> cases = {
        {"", "no line with the boundary"},
        {"--c\r\n\r\n--c--", "no line with the boundary"},
        {"--b--", "has no part"},
        {good, "was cut"},
        {good + "--b", "was cut"},
        {good + "--b-", "was cut"},
        {"--b\r\n", "was cut"},
        {"--b\r\n--b--", "has no end"},
        {"--b\r\nno colon\r\n\r\n\r\n--b--", "without a name"},
        {part("b", "Content-Type: image/png", "x") + "--b--", "no 'Content-Disposition: form-data'"},
        {part("b", "Content-Disposition: attachment; filename=x", "x") + "--b--",
         "no 'Content-Disposition: form-data'"},
        {part("b", file_header + "\r\n" + file_header, "x") + "--b--", "two Content-Disposition"},
        {part("b", "Content-Disposition: form-data; name=\"x", "x") + "--b--", "has no end"},
        {part("b", "Content-Disposition: form-data; name=\"x\"y", "x") + "--b--", "after a quoted value"},
        {part("b", "Content-Disposition: form-data; name", "x") + "--b--", "has no value"},
        {part("b", file_header + "\r\nContent-Transfer-Encoding: base64", "x") + "--b--", "Content-Transfer-Encoding"},
        {part("b", file_header + "\r\nX: " + std::string(9000, 'x'), "x") + "--b--", "longer than 8192"},
    };
    for (const auto& [body, words] : cases) {
        CAPTURE(body.substr(0, 100));
        CHECK_THROWS_WITH(parse_multipart(body, "b"), Contains(words));
        CHECK_THROWS_AS(parse_multipart(body, "b"), MultipartError);
    }
    std::string many;
    for (int i = 0; i < 3; ++i) {
        many += good;
    }
    CHECK(parse_multipart(many + "--b--", "b", {3, 8192}).size() == 3);
    CHECK_THROWS_AS(parse_multipart(many + "--b--", "b", {2, 8192}), TooManyPartsError);
}

TEST_CASE("the boundary is read from the Content-Type", "[multipart]") {
    CHECK(multipart_boundary("multipart/form-data; boundary=abc") == "abc");
    CHECK(multipart_boundary("multipart/form-data; charset=utf-8; Boundary=\"a b:c\"; x=y") == "a b:c");
    CHECK(media_type(" Multipart/Form-Data ; boundary=abc") == "multipart/form-data");
    for (const std::string bad :
         {"", "; boundary", "; boundary=", "; boundary=\"a ", "; boundary=\"a \"", "; boundary=a\xff",
          "; boundary=a; boundary=b"}) {
        CAPTURE(bad);
        CHECK_THROWS_AS(multipart_boundary("multipart/form-data" + bad), MultipartError);
    }
    CHECK_THROWS_AS(multipart_boundary("multipart/form-data; boundary=" + std::string(71, 'a')), MultipartError);
}

TEST_CASE("a query is decoded", "[service]") {
    using Words = std::vector<std::pair<std::string, std::string>>;
    CHECK(parse_query("").empty());
    CHECK(parse_query("a=1&&b=%41%2b+%e4&c&=") == Words{{"a", "1"}, {"b", "A+ \xe4"}, {"c", ""}, {"", ""}});
    // What Beast lets pass and no URL may have.
    CHECK(parse_query("a=[|]\xe4&b==") == Words{{"a", "[|]\xe4"}, {"b", "="}});
    CHECK(path_decoded("a+b%2F%00") == std::string("a+b/\0", 5));
    for (const std::string bad : {"a=%", "a=%4", "%zz=1", "a=1&%61=2"}) {
        CAPTURE(bad);
        CHECK_THROWS_AS(parse_query(bad), BadQuery);
    }
}

TEST_CASE("an image is answered with what was found", "[service]") {
    Serving serving;
    const auto response = serving.detect(png(32, 16, 50));
    REQUIRE(response.status == 200);
    const auto json = Json::parse(response.body);
    CHECK(json["model"] == Json({{"name", "small"}, {"content_hash", "abc"}}));
    const auto& image = json["images"][0];
    CHECK(image["width"] == 32);
    CHECK(image["height"] == 16);
    CHECK(image["batch"] == 1);
    CHECK_FALSE(image.contains("name"));
    REQUIRE(image["detections"].size() == 2);
    const auto& second = image["detections"][1];
    // The same float32 comes back.
    CHECK(second["score"].get<float>() == 0.1234567F);
    CHECK(second["box"][0].get<float>() == 8.3F / 0.5F);
    CHECK(second["class"] == 1);
    CHECK(second["name"] == "dog");
    for (const auto* time : {"decode", "queue", "run"}) {
        CHECK(image["ms"][time].get<double>() >= 0);
    }
}

TEST_CASE("a query narrows what is answered", "[service]") {
    Serving serving;
    const auto count = [&](const std::string& query) {
        const auto response = serving.detect(png(4, 4, 0), query);
        REQUIRE(response.status == 200);
        return Json::parse(response.body)["images"][0]["detections"].size();
    };
    CHECK(count("?score_threshold=0.1") == 2);
    CHECK(count("?score_threshold=0.1234567") == 1);  // a score must exceed it
    CHECK(count("?max_detections=1") == 1);
    CHECK(count("?max_detections=3&score_threshold=1") == 0);
    const std::vector<std::pair<std::string, std::string>> cases = {
        {"?score_threshold=0.09", "score_threshold is \"0.09\", allowed is 0.1"},
        {"?score_threshold=1.5", "to 1"},
        {"?score_threshold=nan", "score_threshold is"},
        {"?score_threshold=", "score_threshold is \"\""},
        {"?score_threshold=0.5x", "score_threshold is"},
        {"?max_detections=0", "allowed is 1 to 3"},
        {"?max_detections=4", "allowed is 1 to 3"},
        {"?max_detections=1.0", "allowed is 1 to 3"},
        {"?treshold=0.5", "the key \"treshold\"; allowed are score_threshold, max_detections, masks and partial"},
        {"?partial=1", "partial is \"1\", allowed is true or false"},
        {"?masks=true", "masks is true, and the model gives none"},
        {"?max_detections=1&max_detections=2", "twice"},
        {"?%ff%0a=1", "the key \"\\ufffd\\n\""},
        {"?a=%", "hexadecimal"},
    };
    for (const auto& [query, words] : cases) {
        CAPTURE(query);
        const auto response = serving.detect(png(4, 4, 0), query);
        CHECK(response.status == 400);
        CHECK(error_type(response) == "bad-query");
        CHECK_THAT(message(response), Contains(words));
    }
}

TEST_CASE("masks are given with their detections, unless they are not wanted", "[service]") {
    Serving serving({}, {}, masks_manifest_json());
    const auto image = [&](const std::string& query) {
        const auto response = serving.detect(png(80, 40, 0), query);
        REQUIRE(response.status == 200);
        return Json::parse(response.body)["images"][0];
    };
    const auto all = image("");
    REQUIRE(all["detections"].size() == 2);
    const std::vector<float> first{1, 0.75F, 1, 0};
    const auto expected = paste_mask(first, {0, 0, 20, 20}, 80, 40).counts();
    // One of its letters stands in another way in the JSON.
    CHECK_THAT(expected, Contains("\\"));
    CHECK(all["detections"][0]["mask"] == Json({{"size", {40, 80}}, {"counts", expected}}));
    CHECK(all["ms"]["masks"].get<double>() >= 0);
    CHECK(image("?max_detections=1")["detections"].size() == 1);
    CHECK(image("?score_threshold=0.5")["detections"][0]["mask"] == all["detections"][0]["mask"]);
    const auto without = image("?masks=false");
    CHECK(without["detections"].size() == 2);
    CHECK_FALSE(without["detections"][0].contains("mask"));
    CHECK_FALSE(without["ms"].contains("masks"));
    CHECK(Json::parse(serving.get("/v1/model").body)["masks"] == Json({{"size", 2}, {"threshold", 0.5}}));
    CHECK(Json::parse(Serving().get("/v1/model").body)["masks"].is_null());

    // As tensors, with zeros after the last detection.
    CHECK(
        Json::parse(serving.get("/v2/models/small").body)["outputs"][4] ==
        Json({{"name", "masks"}, {"datatype", "FP32"}, {"shape", {-1, 3, 2, 2}}}));
    const auto tensors = [&](const std::string& rest) {
        const std::string numbers(2 * 3 * 8 * 16 - 1, '0');
        std::string data = numbers;
        for (std::size_t i = 1; i < data.size(); i += 2) {
            data[i] = ',';
        }
        const auto body =
            R"({"inputs":[{"name":"images","shape":[1,3,8,16],"datatype":"FP32","data":[)" + data + "]}]" + rest + "}";
        return serving.call({{"POST", "/v2/models/small/infer", "", "", {}, false}, body, {}, nullptr, nullptr});
    };
    const auto output = Json::parse(tensors("").body)["outputs"][4];
    CHECK(output["shape"] == Json({1, 3, 2, 2}));
    CHECK(output["data"] == Json({1.0, 0.75, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0}));
    CHECK(Json::parse(tensors(R"(,"outputs":[{"name":"scores"}])").body)["outputs"].size() == 1);
}

TEST_CASE("masks, keypoints and rotated boxes are given with their detections", "[service]") {
    Serving serving({}, {}, parts_manifest_json());
    const auto image = [&](const std::string& query) {
        const auto response = serving.detect(png(32, 16, 0), query);
        REQUIRE(response.status == 200);
        return Json::parse(response.body)["images"][0];
    };
    const auto all = image("");
    REQUIRE(all["detections"].size() == 2);
    const auto& first = all["detections"][0];
    CHECK(first["box"] == Json({0.0, 0.0, 8.0, 8.0}));
    CHECK(first["keypoints"] == Json({{2.0, 4.0, 0.5}, {6.0, 8.0, 0.25}}));
    CHECK(first["rotated_box"] == Json({4.0, 4.0, 8.0, 8.0, 0.0}));
    CHECK(
        first["mask"] ==
        Json(
            {{"size", {16, 32}},
             {"counts", RunLengths{32, 16, {0, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 392}}.counts()}}));
    const auto& second = all["detections"][1];
    CHECK(second["keypoints"] == Json({{20.0, 6.0, 0.75}, {32.0, 0.0, 1.0}}));
    CHECK(second["rotated_box"][4].get<double>() == Approx(0.5));
    CHECK(image("?max_detections=1")["detections"][0] == first);
    const auto without = image("?masks=false");
    CHECK_FALSE(without["detections"][0].contains("mask"));
    CHECK(without["detections"][0]["keypoints"] == first["keypoints"]);

    const auto facts = Json::parse(serving.get("/v1/model").body);
    CHECK(facts["masks"] == Json({{"prototypes", {2, 2, 4}}, {"threshold", 0.5}}));
    CHECK(facts["keypoints"] == Json({{"names", {"head", "tail"}}, {"skeleton", {{0, 1}}}}));
    CHECK(facts["rotated_boxes"] == true);
    const auto plain = Json::parse(Serving().get("/v1/model").body);
    CHECK((plain["keypoints"].is_null() && plain["rotated_boxes"] == false));

    const auto outputs = Json::parse(serving.get("/v2/models/small").body)["outputs"];
    REQUIRE(outputs.size() == 8);
    CHECK(outputs[4] == Json({{"name", "mask_coefficients"}, {"datatype", "FP32"}, {"shape", {-1, 3, 2}}}));
    CHECK(outputs[5] == Json({{"name", "prototypes"}, {"datatype", "FP32"}, {"shape", {-1, 2, 2, 4}}}));
    CHECK(outputs[6] == Json({{"name", "keypoints"}, {"datatype", "FP32"}, {"shape", {-1, 3, 2, 3}}}));
    CHECK(outputs[7] == Json({{"name", "rotated_boxes"}, {"datatype", "FP32"}, {"shape", {-1, 3, 5}}}));
}

TEST_CASE("masks that would make an answer too large are refused, and say what helps", "[service]") {
    ServiceOptions options;
    options.max_masks = 10;
    Serving serving(options, {}, masks_manifest_json());
    const auto response = serving.detect(png(320, 160, 0));
    CHECK(response.status == 413);
    CHECK(error_type(response) == "image-too-large");
    CHECK_THAT(message(response), Contains("larger than 10 bytes") && Contains("masks=false"));
    CHECK(serving.detect(png(320, 160, 0), "?masks=false").status == 200);
    CHECK(serving.get("/healthz").status == 200);
}

TEST_CASE("several images are answered in their order", "[service]") {
    Serving serving;
    std::string body;
    for (std::uint32_t i = 1; i <= 4; ++i) {
        body += part("b", "Content-Disposition: form-data; name=n" + std::to_string(i), png(i, 1, 9));
    }
    const auto response = serving.detect(body + "--b--", "", "multipart/form-data; boundary=b");
    REQUIRE(response.status == 200);
    const auto images = Json::parse(response.body)["images"];
    REQUIRE(images.size() == 4);
    for (int i = 0; i < 4; ++i) {
        CHECK(images[static_cast<std::size_t>(i)]["name"] == "n" + std::to_string(i + 1));
        CHECK(images[static_cast<std::size_t>(i)]["width"] == i + 1);
    }
}

TEST_CASE("the first bad image of several is named, with nothing of the client unescaped", "[service]") {
    Serving serving;
    const auto good = part("b", file_header, png(4, 4, 0));
    const auto bad = part("b", "Content-Disposition: form-data; name=x; filename=\"\x01\xff.png\"", "no image");
    for (int i = 0; i < 20; ++i) {
        const auto response = serving.detect(good + bad + bad + "--b--", "", "multipart/form-data; boundary=b");
        CHECK(response.status == 400);
        CHECK(error_type(response) == "bad-image");
        CHECK_THAT(message(response), Contains("image 1 (\"\\u0001\\ufffd.png\"): "));
    }
    const auto wrong = serving.detect(
        part("b", file_header + "\r\nContent-Type: image/gif", "x") + "--b--", "", "multipart/form-data; boundary=b");
    CHECK(wrong.status == 415);
    CHECK_THAT(message(wrong), Contains("image 0 (\"a.jpg\"): ") && Contains("image/gif"));
}

TEST_CASE("where partial answers are wanted, an image that failed is the loss of no other", "[service]") {
    Serving serving;
    const auto good = part("b", file_header, png(4, 4, 0));
    const auto bad = part("b", "Content-Disposition: form-data; name=x", "no image");
    const auto detect = [&](const std::string& body, const std::string& query) {
        return serving.detect(body + "--b--", query, "multipart/form-data; boundary=b");
    };
    const auto response = detect(bad + good + bad + good, "?partial=true");
    REQUIRE(response.status == 200);
    const auto images = Json::parse(response.body)["images"];
    REQUIRE(images.size() == 4);
    for (const std::size_t index : {0U, 2U}) {
        CHECK(images[index]["name"] == "x");
        CHECK(images[index]["error"]["type"] == "bad-image");
        CHECK_THAT(
            images[index]["error"]["message"].get<std::string>(), Contains("image " + std::to_string(index) + " "));
        CHECK_FALSE(images[index].contains("detections"));
        CHECK(images[index + 1]["detections"].size() == 2);
        CHECK_FALSE(images[index + 1].contains("error"));
    }
    CHECK_THAT(serving.metrics.text({}), Contains("trtdet_errors_total{type=\"bad-image\"} 2"));
    CHECK(detect(bad + good, "?partial=false").status == 400);
    // Nothing was found out: that is an error as a whole.
    CHECK(detect(bad + bad, "?partial=true").error == "bad-image");
    serving.engine->fails = true;
    CHECK(detect(good + bad, "?partial=true").error == "engine-failed");
}

TEST_CASE("what cannot be taken is refused before its body is read", "[service]") {
    ServiceOptions options;
    options.max_body = 100;
    Serving serving(options);
    struct Case {
        Head head;
        int status;
        std::string type;
    };
    const std::vector<Case> cases = {
        {{"GET", "/nothing", "", "", {}, false}, 404, "not-found"},
        {{"GET", "", "", "", {}, false}, 404, "not-found"},
        {{"GET", "/v1/detect", "", "", {}, false}, 405, "method-not-allowed"},
        {{"POST", "/metrics", "", "", 1, false}, 405, "method-not-allowed"},
        {{"get", "/metrics", "", "", {}, false}, 405, "method-not-allowed"},
        {{"GET", "/healthz", "", "", 1, false}, 413, "body-too-large"},
        {{"POST", "/v1/detect", "image/png", "", {}, false}, 411, "length-required"},
        {{"POST", "/v1/detect", "image/png", "", 101, false}, 413, "body-too-large"},
        {{"POST", "/v1/detect", "image/gif", "", 100, false}, 415, "unsupported-media-type"},
        {{"POST", "/v1/detect", "text/plain", "", 100, false}, 415, "unsupported-media-type"},
        {{"POST", "/v1/detect", "image/png", "br", 100, false}, 415, "unsupported-media-type"},
        {{"POST", "/v1/detect", "multipart/form-data", "", 100, false}, 400, "bad-multipart"},
        {{"POST", "/v1/detect?x=1", "image/png", "", 100, false}, 400, "bad-query"},
    };
    for (const auto& one : cases) {
        CAPTURE(one.head.target);
        const auto response = serving.service->refuse(one.head);
        REQUIRE(response);
        CHECK(response->status == one.status);
        CHECK(response->error == one.type);
        CHECK(error_type(*response) == one.type);
    }
    const auto refused = serving.service->refuse({"DELETE", "/v1/detect", "", "", {}, false});
    CHECK(refused->headers == std::vector<std::pair<std::string, std::string>>{{"Allow", "POST"}});
    CHECK_FALSE(serving.service->refuse({"POST", "http://host/v1/detect", "image/PNG; x", "", 100, false}));
    CHECK_FALSE(serving.service->refuse({"POST", "/v1/detect", "image/jpeg", "identity", {}, true}));
    CHECK_FALSE(serving.service->refuse({"POST", "/v1/detect", "", "", 100, false}));
    CHECK_FALSE(serving.service->refuse({"HEAD", "/metrics?collect=all", "", "", {}, false}));
}

TEST_CASE("a bad body has an error of its own kind", "[service]") {
    ServiceOptions options;
    options.limits.max_pixels = 100;
    options.max_images = 1;
    Serving serving(options);
    CHECK(serving.detect("").error == "empty-body");
    CHECK(serving.detect("no image").error == "bad-image");
    CHECK(serving.detect(png(10, 10, 0)).status == 200);
    const auto large = serving.detect(png(10, 11, 0));
    CHECK(large.status == 413);
    CHECK(large.error == "image-too-large");
    const auto two = part("b", file_header, "x") + part("b", file_header, "x") + "--b--";
    const auto many = serving.detect(two, "", "multipart/form-data; boundary=b");
    CHECK(many.status == 413);
    CHECK(many.error == "too-many-images");
    CHECK(serving.detect(two, "", "multipart/form-data; boundary=c").error == "bad-multipart");
}

TEST_CASE("an engine that fails is told of in the log, not to the client, and to /healthz in the end", "[service]") {
    ServiceOptions options;
    options.unhealthy_after = 3;
    Serving serving(options);
    serving.engine->fails = true;
    for (int i = 0; i < 3; ++i) {
        CHECK(serving.get("/healthz").status == 200);
        const auto response = serving.detect(png(4, 4, 0));
        CHECK(response.status == 500);
        CHECK(response.error == "engine-failed");
        CHECK_THAT(response.body, !Contains("secret"));
    }
    CHECK(serving.detect("no image").status == 400);  // says nothing of the engine
    CHECK(serving.get("/healthz").status == 503);
    CHECK(serving.get("/readyz").status == 503);
    serving.engine->fails = false;
    CHECK(serving.detect(png(4, 4, 0)).status == 200);
    CHECK(serving.get("/healthz").status == 200);
    CHECK(serving.get("/readyz").status == 200);
}

TEST_CASE("a queue that is full and too many requests are refused at once, until there is room", "[service]") {
    ServiceOptions options;
    options.max_requests = GENERATE(2, 3);
    options.max_client_percent = 100;
    CAPTURE(options.max_requests);
    DetectorOptions detecting;
    detecting.lanes = 1;
    detecting.queue_capacity = 1;
    Serving serving(options, detecting);
    const auto image = png(4, 4, 0);
    const auto request = [&] {
        return Request{{"POST", "/v1/detect", "image/png", "", image.size(), false}, image, {}, nullptr, nullptr};
    };
    std::unique_lock closed(serving.engine->gate);
    auto running = serving.send(request());
    while (!serving.engine->running) {
        std::this_thread::yield();
    }
    auto waiting = serving.send(request());
    while (serving.detector->queued() == 0) {
        std::this_thread::yield();
    }
    const auto refused = serving.send(request()).get();
    CHECK(refused.status == 503);
    CHECK(refused.error == "overloaded");
    CHECK_THAT(message(refused), Contains(options.max_requests == 2 ? "all 2 requests" : "images wait"));
    CHECK(refused.headers == std::vector<std::pair<std::string, std::string>>{{"Retry-After", "1"}});
    CHECK(serving.service->refuse(request().head).has_value() == (options.max_requests == 2));
    closed.unlock();
    CHECK(running.get().status == 200);
    CHECK(waiting.get().status == 200);
    CHECK(serving.call(request()).status == 200);
    CHECK_THAT(serving.metrics.text({}), Contains("trtdet_requests_in_flight 0"));
}

TEST_CASE("an image whose time is over is not decoded", "[service]") {
    Serving serving;
    Request request{{"POST", "/v1/detect", "image/png", "", 8, false}, "no image", Clock::now() - 1h, nullptr, nullptr};
    CHECK(serving.send(request).get().error == "deadline-exceeded");
    request.arrived = Clock::now();
    request.abandoned = std::make_shared<std::atomic<bool>>(true);
    CHECK(serving.send(request).get().status == 504);
}

TEST_CASE("the other endpoints say what runs", "[service]") {
    Serving serving;
    const auto model = Json::parse(serving.get("/v1/model").body);
    CHECK(model["name"] == "small");
    CHECK(model["runs_on"] == "nothing");
    CHECK(model["score_threshold"].dump() == "0.1");
    CHECK(model["classes"] == Json({"cat", "dog"}));
    CHECK(Json::parse(serving.get("/").body)["endpoints"].size() == 26);
    CHECK(Json::parse(serving.get("/readyz").body) == Json({{"status", "ready"}, {"runs_on", {{"small", "nothing"}}}}));
    serving.service->leave();
    const auto leaving = serving.get("/readyz");
    CHECK(leaving.status == 503);
    CHECK(error_type(leaving) == "stopping");
    CHECK(serving.get("/healthz").status == 200);
    CHECK(serving.detect(png(4, 4, 0)).status == 200);
}

namespace {

const InputSpec& tensor_input() {
    static const InputSpec input = parse_manifest(manifest_json().dump()).input;  // 8 x 16
    return input;
}

Json inference(const Json& data = Json::array()) {
    const auto& input = tensor_input();
    return {
        {"inputs",
         {{{"name", input.name},
           {"shape", {1, 3, input.preprocess.height, input.preprocess.width}},
           {"datatype", "FP32"},
           {"data", data}}}}};
}

InferenceRequest parse_tensors(const std::string& body, const std::string& length = "") {
    return parse_inference(body, length, tensor_input(), {"num_dets", "boxes"}, {2});
}

}  // namespace

TEST_CASE("a tensor is read from JSON and from the bytes behind it", "[inference]") {
    const auto count = tensor_input().preprocess.values();
    std::vector<float> numbers(count);
    for (std::size_t i = 0; i < count; ++i) {
        numbers[i] = static_cast<float>(i) / 3;
    }
    const auto flat = parse_tensors(inference(numbers).dump());
    CHECK(flat.images == 1);
    CHECK(flat.image(0) == numbers);
    REQUIRE(flat.outputs.size() == 2);
    CHECK_FALSE(flat.outputs[0].binary);
    Json nested = Json::array();
    for (int row = 0; row < 24; ++row) {
        nested.push_back(std::vector<float>(numbers.begin() + 16 * row, numbers.begin() + 16 * (row + 1)));
    }
    CHECK(parse_tensors(inference(Json::array({nested})).dump()).image(0) == numbers);

    auto request = inference();
    request["inputs"][0].erase("data");
    request["inputs"][0]["shape"][0] = 2;
    request["inputs"][0]["parameters"] = {{"binary_data_size", 8 * count}};
    request["outputs"] = {{{"name", "boxes"}}, {{"name", "num_dets"}, {"parameters", {{"binary_data", false}}}}};
    request["parameters"] = {{"binary_data_output", true}, {"priority", 1}};
    request["id"] = "7";
    const auto head = request.dump();
    std::string body = head + std::string(4 * count, '\0');
    body.append(reinterpret_cast<const char*>(numbers.data()), 4 * count);
    const auto binary = parse_tensors(body, std::to_string(head.size()));
    CHECK(binary.images == 2);
    CHECK(binary.id == "7");
    CHECK(binary.image(0) == std::vector<float>(count));
    CHECK(binary.image(1) == numbers);
    REQUIRE(binary.outputs.size() == 2);
    CHECK(binary.outputs[0].index == 1);
    CHECK(binary.outputs[0].binary);
    CHECK_FALSE(binary.outputs[1].binary);
}

TEST_CASE("an inference that is not what the model takes is refused with what it takes", "[inference]") {
    const auto count = tensor_input().preprocess.values();
    const Json numbers = std::vector<float>(count);
    const auto with = [&](const std::string& path, const Json& value) {
        auto request = inference(numbers);
        request[Json::json_pointer(path)] = value;
        return request.dump();
    };
    const auto& name = tensor_input().name;
    const std::vector<std::pair<std::string, std::string>> cases = {
        {"", "is not JSON"},
        {"{\"inputs\": [", "is not JSON"},
        {"[]", "the request is not an object"},
        {"{}", "the request has no 'inputs'"},
        {with("/inputs", 1), "not a list of one input"},
        {with("/inputs", Json::array({1})), "an input is not an object"},
        {with("/inputs/1", Json::object()), "not a list of one input"},
        {with("/inputs/0/name", "x"), "no input \"x\"; expected \"" + name},
        {with("/inputs/0/name", 1), "'name' of an input is not a string"},
        {with("/inputs/0/datatype", "FP16"), "expected \"FP32\""},
        {with("/inputs/0/shape", {3, 3, 8, 16}), "expected [1 to 2,3,8,16]"},
        {with("/inputs/0/shape", {0, 3, 8, 16}), "expected [1 to 2,3,8,16]"},
        {with("/inputs/0/shape", {-1, 3, 8, 16}), "expected [1 to 2,3,8,16]"},
        {with("/inputs/0/shape", {1, 3, 8}), "expected [1 to 2,3,8,16]"},
        {with("/inputs/0/shape", {1.0, 3, 8, 16}), "expected [1 to 2,3,8,16]"},
        {with("/inputs/0/shape", {2, 3, 8, 16}), "its shape says " + std::to_string(2 * count)},
        {with("/inputs/0/data", 5), "the input's data has 0 numbers"},
        {with("/inputs/0/data", Json::array({"1"})), "what is not a number"},
        {with("/inputs/0/data", Json::array({Json::array({nullptr})})), "what is not a number"},
        {with("/inputs/0/data", std::vector<float>(2 * count + 1)), "more than the " + std::to_string(2 * count)},
        {with("/inputs/0/parameters", 1), "'parameters' of the input is not an object"},
        {with("/inputs/0/parameters", {{"binary_data_size", 4}}), "has both"},
        {with("/inputs/0/parameters", {{"shared_memory_region", "x"}}), "'shared_memory_region' of the input"},
        {with("/outputs", 1), "'outputs' is not a list"},
        {with("/outputs", {{{"name", "x"}}}), "no output \"x\"; it has num_dets, boxes"},
        {with("/outputs", {{{"name", "boxes"}}, {{"name", "boxes"}}}), "asked for twice"},
        {with("/outputs", {{{"name", "boxes"}, {"parameters", {{"binary_data", 1}}}}}), "not true or false"},
        {with("/parameters", {{"binary_data_output", "yes"}}), "not true or false"},
        {with("/id", 1), "'id' of the request is not a string"},
        // What would take memory for no use.
        {with("/x", std::vector<int>(20'000)), "more lists, objects or values than any needs"},
        {with("/inputs/0/data", std::vector<Json>(20'000, Json::array())), "more lists, objects or values"},
        {std::string(1'000'000, '['), "in more than 12 others"},
    };
    for (const auto& [body, words] : cases) {
        CAPTURE(body.substr(0, 200));
        CHECK_THROWS_WITH(parse_tensors(body), Contains(words));
        CHECK_THROWS_AS(parse_tensors(body), InferenceError);
    }
    auto binary = inference();
    binary["inputs"][0].erase("data");
    CHECK_THROWS_WITH(parse_tensors(binary.dump()), Contains("neither 'data' nor"));
    binary["inputs"][0]["parameters"] = {{"binary_data_size", 4 * count}};
    const auto head = binary.dump();
    for (const auto& [length, tail] : std::vector<std::pair<std::string, std::size_t>>{
             {std::to_string(head.size()), 4 * count - 1},
             {std::to_string(head.size()), 4 * count + 1},
             {"", 0},
             {"x", 0},
             {"-1", 4},
             {std::to_string(head.size() + 1), 0}}) {
        CAPTURE(length, tail);
        CHECK_THROWS_AS(parse_tensors(head + std::string(tail, '\0'), length), InferenceError);
    }
    const auto json = inference(numbers).dump();
    CHECK_THROWS_WITH(parse_tensors(json + "x", std::to_string(json.size())), Contains("1 bytes stand behind"));
}

TEST_CASE("tensors are detected on, with boxes in pixels of the input", "[inference]") {
    Serving serving;
    const std::vector<float> numbers(tensor_input().preprocess.values());
    const auto infer = [&](const std::string& model) {
        return serving.call(
            {{"POST", "/v2/models/" + model + "/infer", "", "", {}, false},
             inference(numbers).dump(),
             {},
             nullptr,
             nullptr});
    };
    const auto response = infer("small");
    REQUIRE(response.status == 200);
    const auto answer = Json::parse(response.body);
    CHECK(answer["model_name"] == "small");
    CHECK(
        answer["outputs"][0] == Json({{"name", "num_dets"}, {"datatype", "INT32"}, {"shape", {1, 1}}, {"data", {2}}}));
    CHECK(answer["outputs"][1]["shape"] == Json({1, 3, 4}));
    CHECK(answer["outputs"][1]["data"][4].get<float>() == 8.3F);
    CHECK(answer["outputs"][2]["data"][1].get<float>() == 0.1234567F);
    CHECK(answer["outputs"][3]["data"] == Json({0, 1, 0}));
    CHECK(infer("large").status == 404);
    serving.engine->fails = true;
    const auto failed = infer("small");
    CHECK(failed.status == 500);
    CHECK_THAT(failed.body, !Contains("secret"));
    CHECK_THROWS_AS(serving.detector->detect_input({1, 2}, Clock::time_point::max(), nullptr), ImageError);
}

TEST_CASE("answers are counted, and unknown paths under one name", "[metrics]") {
    Serving serving;
    for (const auto* path : {"/a", "/b", "/v1/detect"}) {
        const Head head{"GET", path, "", "", {}, false};
        auto response = *serving.service->refuse(head);
        serving.service->answered(head, response, 1ms);
    }
    Response good;
    serving.service->answered({"POST", "/v1/detect?x", "", "", {}, false}, good, 3ms);
    serving.metrics.bundle({"m", "a", "1", "x", "0"});
    serving.metrics.bundle({"m", "b", "2", "x", "0"});
    serving.metrics.bundle({"n", "a", "3", "x", "0"});
    const auto response = serving.get("/metrics");
    CHECK(response.content_type == "text/plain; version=0.0.4; charset=utf-8");
    for (const auto* line :
         {"trtdet_requests_total{code=\"404\",path=\"other\"} 2",
          "trtdet_requests_total{code=\"405\",path=\"/v1/detect\"} 1", "trtdet_errors_total{type=\"not-found\"} 2",
          "trtdet_detect_seconds_count 1", "trtdet_detect_seconds_bucket{le=\"0.0025\"} 0",
          "trtdet_detect_seconds_bucket{le=\"0.005\"} 1", "trtdet_bundle_info{content_hash=\"2\"",
          "trtdet_bundle_info{content_hash=\"3\""}) {
        CHECK_THAT(response.body, Contains(line));
    }
    CHECK_THAT(response.body, !Contains("content_hash=\"1\""));
}

TEST_CASE("a container's quota is the number of cores", "[cores]") {
    const auto all = static_cast<int>(std::thread::hardware_concurrency());
    const auto cores = [](const std::string& group, const std::map<std::string, std::string>& files) {
        const Folder folder;
        std::filesystem::create_directories(folder.path() / "proc/self");
        folder.write("proc/self/cgroup", group);
        for (const auto& [name, text] : files) {
            std::filesystem::create_directories((folder.path() / name).parent_path());
            folder.write(name, text);
        }
        return usable_cores(folder.path());
    };
    CHECK(cores("", {}) == all);
    CHECK(cores("0::/\n", {{"sys/fs/cgroup/cpu.max", "max 100000\n"}}) == all);
    CHECK(cores("0::/\n", {{"sys/fs/cgroup/cpu.max", "50000 100000\n"}}) == 1);
    CHECK(cores("0::/\n", {{"sys/fs/cgroup/cpu.max", "150000 100000\n"}}) == std::min(all, 2));
    CHECK(cores("0::/\n", {{"sys/fs/cgroup/cpu.max", "9900000 100000\n"}}) == std::min(all, 99));
    // Of the group itself and of each that it is in.
    CHECK(
        cores(
            "0::/a/b\n", {{"sys/fs/cgroup/a/cpu.max", "10000 100000"}, {"sys/fs/cgroup/a/b/cpu.max", "max 100000"}}) ==
        1);
    const std::string old = "sys/fs/cgroup/cpu,cpuacct/";
    CHECK(
        cores(
            "3:memory:/x\n4:cpu,cpuacct:/x\n",
            {{old + "cpu.cfs_quota_us", "-1"}, {old + "cpu.cfs_period_us", "100000"}}) == all);
    CHECK(
        cores(
            "4:cpu,cpuacct:/x\n", {{old + "x/cpu.cfs_quota_us", "100000"}, {old + "x/cpu.cfs_period_us", "100000"}}) ==
        1);
    CHECK(cores("nonsense\n4:cpu\n", {{"sys/fs/cgroup/cpu.max", "x"}}) == all);
}

TEST_CASE("memory is shared, a part of it by each client", "[memory]") {
    MemoryBudget budget("the bodies", "--max-bodies-mb", 100, 60);
    const auto mine = std::make_shared<Client>(1), theirs = std::make_shared<Client>(2);
    std::optional<MemoryBudget::Share> first(std::in_place, budget, mine);
    first->set(50);
    MemoryBudget::Share second(budget, mine);
    const auto limit_of = [](MemoryBudget::Share& share, std::uint64_t bytes) {
        try {
            share.set(bytes);
        } catch (const MemoryLimitError& error) {
            CHECK(std::string(error.what()).find("--max-bodies-mb") != std::string::npos);
            return error.response().status;
        }
        return 200;
    };
    CHECK(limit_of(second, 61) == 413);  // more than one client ever has
    CHECK(limit_of(second, 11) == 429);
    CHECK(limit_of(second, 10) == 200);
    MemoryBudget::Share other(budget, theirs);
    CHECK(limit_of(other, 41) == 503);
    CHECK(limit_of(other, 40) == 200);
    CHECK(budget.taken() == 100);
    CHECK(limit_of(other, 20) == 200);
    CHECK(budget.taken() == 80);
    CHECK_THROWS_AS(other.wait_for(61, Clock::now()), MemoryLimitError);
    CHECK_THROWS_AS(other.wait_for(60, Clock::now() + 1ms), DeadlineError);
    std::thread waits([&other] { other.wait_for(60, Clock::time_point::max()); });
    first.reset();
    waits.join();
    CHECK(budget.taken() == 70);

    other.set(0);
    first.emplace(budget, mine);
    first->set(45);
    CHECK_FALSE(second.try_set(20));
    first.reset();
    // There is room again by now, which is not why it was refused.
    CHECK(second.refusal(20).response().status == 429);
}

TEST_CASE("clients are told apart by their addresses", "[clients]") {
    Clients clients;
    const auto of = [&clients](const char* text) { return clients.of(boost::asio::ip::make_address(text)); };
    const auto one = of("192.0.2.1");
    CHECK(of("192.0.2.1") == one);
    CHECK(of("::ffff:192.0.2.1") == one);
    CHECK(of("192.0.2.2") != one);
    const auto six = of("2001:db8:1:2::3");
    CHECK(of("2001:db8:1:2:ffff::1") == six);
    CHECK(of("2001:db8:1:3::3") != six);
    const auto number = of("192.0.2.3")->number;
    for (int last = 0; last < 200; ++last) {
        of(("198.51.100." + std::to_string(last)).c_str());
    }
    CHECK(of("192.0.2.3")->number != number);  // whoever nobody holds is forgotten
    CHECK(of("192.0.2.1") == one);
    CHECK(part_of_limit(1, 50) == 1);
    CHECK(part_of_limit(1023, 50) == 511);
    CHECK(part_of_limit(std::uint64_t{1} << 62U, 100) == std::uint64_t{1} << 62U);
}

TEST_CASE("clients that are refused again and again wait", "[clients]") {
    Clients clients;
    const auto mine = boost::asio::ip::make_address("192.0.2.1");
    const auto refusals = clients.of(mine)->refusals;
    for (int count = 0; count < 200; ++count) {
        CHECK_FALSE(refusals->add());
        CHECK(refusals->may_connect());
    }
    CHECK_FALSE(refusals->forgiven());
    int too_many = 0;
    for (int count = 0; count < 10'000; ++count) {
        too_many += refusals->add() ? 1 : 0;
    }
    CHECK(too_many > 9000);
    CHECK_FALSE(refusals->may_connect());
    // Whoever leaves and comes back is the same.
    for (int last = 0; last < 200; ++last) {
        CHECK(clients.of(boost::asio::ip::make_address("198.51.100." + std::to_string(last)))->refusals->may_connect());
    }
    CHECK(clients.of(mine)->refusals == refusals);
    const auto soon = Clock::now() + 10s;
    while (!refusals->may_connect() && Clock::now() < soon) {
        std::this_thread::sleep_for(1ms);
    }
    REQUIRE(Clock::now() < soon);
    CHECK_FALSE(refusals->may_connect());
    while (!refusals->forgiven() && Clock::now() < soon) {
        std::this_thread::sleep_for(1ms);
    }
    CHECK(Clock::now() < soon);
}

TEST_CASE("clients take turns, and there are threads for others", "[workers]") {
    std::mutex mutex;
    std::vector<int> order;
    std::promise<void> open;
    const auto gate = open.get_future().share();
    const auto note = [&](int what) {
        return [&, what] {
            const std::lock_guard lock(mutex);
            order.push_back(what);
        };
    };
    Workers workers(1);
    std::promise<void> begun;
    workers.post(1, [&] {
        begun.set_value();
        gate.wait();
    });
    begun.get_future().wait();
    for (int i = 0; i < 3; ++i) {
        workers.post(1, note(10 + i));
    }
    // One of another client's is done meanwhile, in a thread of the others.
    std::promise<void> done;
    workers.post(2, [&] { done.set_value(); });
    done.get_future().wait();
    {
        const std::lock_guard lock(mutex);
        CHECK(order.empty());
    }
    open.set_value();
    workers.post(1, [&] { workers.post(3, note(30)); });
    workers.finish();
    CHECK(order == std::vector<int>{10, 11, 12, 30});
    workers.post(1, note(13));
    CHECK(order.back() == 13);
}

TEST_CASE("a meter counts what its thread takes, and refuses more than is allowed", "[memory]") {
    std::vector<std::size_t> asked;
    HeapMeter meter([&asked](std::size_t bytes) {
        asked.push_back(bytes);
        return bytes <= 3U << 20U;
    });
    CHECK(HeapMeter::current() == &meter);
    std::thread([] { CHECK(HeapMeter::current() == nullptr); }).join();
    CHECK(meter.take(1000));
    CHECK(meter.take(2000));
    CHECK(asked == std::vector<std::size_t>{1U << 20U});
    CHECK(meter.take(2U << 20U));
    CHECK(asked.back() == 3U << 20U);
    CHECK_FALSE(meter.refused());
    CHECK_FALSE(meter.take(1U << 20U));
    CHECK(meter.refused());
    CHECK(meter.refused_bytes() == (3U << 20U) + 3000);
    meter.give(2U << 20U);
    CHECK(meter.take(1U << 20U));
    CHECK_FALSE(meter.take(std::numeric_limits<std::size_t>::max()));
}

TEST_CASE("spare memory is of blocks that are used again, until all are taken", "[memory]") {
    alignas(std::max_align_t) static unsigned char memory[10'032];
    SpareMemory spare(memory, sizeof memory);
    CHECK(spare.take(SpareMemory::largest + 1) == nullptr);
    std::vector<void*> taken;
    while (void* const block = spare.take(65)) {
        CHECK(spare.owns(block));
        CHECK(reinterpret_cast<std::uintptr_t>(block) % alignof(std::max_align_t) == 0);
        std::memset(block, static_cast<int>(taken.size()), 65);
        taken.push_back(block);
    }
    CHECK(taken.size() == 10'032 / (128 + 16));
    for (std::size_t i = 0; i < taken.size(); ++i) {
        CHECK(static_cast<unsigned char*>(taken[i])[64] == i);
        spare.give(taken[i]);
    }
    for (std::size_t i = 0; i < taken.size(); ++i) {
        CHECK(spare.take(128) != nullptr);
    }
    CHECK(spare.take(128) == nullptr);
    CHECK(spare.take(1) != nullptr);  // what is left is too small for the others alone
    int elsewhere = 0;
    CHECK_FALSE(spare.owns(&elsewhere));
    CHECK_FALSE(spare.owns(memory + sizeof memory));
}

TEST_CASE("what a client sent cannot forge a line of the log", "[log]") {
    CHECK(quote("a\nb\xff\"") == "\"a\\nb\\ufffd\\\"\"");
    CHECK(quote(std::string(300, 'x')) == "\"" + std::string(200, 'x') + "...\"");
}
