// The parts of trtdet-serve that need no socket.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
#include <condition_variable>
#include <cstring>
#include <future>
#include <mutex>
#include <nlohmann/json.hpp>

#include "bundles.hpp"
#include "log.hpp"
#include "metrics.hpp"
#include "model.hpp"
#include "multipart.hpp"
#include "service.hpp"
#include "trtdet/errors.hpp"

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

// The bytes of a PNG of one colour, 8 bits of grey: a valid file, made by hand as nothing here encodes.
std::string png(std::uint32_t width, std::uint32_t height, std::uint8_t grey) {
    const auto big = [](std::uint32_t number) {
        return std::string{
            static_cast<char>(number >> 24U), static_cast<char>(number >> 16U), static_cast<char>(number >> 8U),
            static_cast<char>(number)};
    };
    const auto crc = [](const std::string& bytes) {
        std::uint32_t sum = 0xffffffffU;
        for (const char byte : bytes) {
            sum ^= static_cast<std::uint8_t>(byte);
            for (int bit = 0; bit < 8; ++bit) {
                sum = (sum >> 1U) ^ ((sum & 1U) != 0 ? 0xedb88320U : 0U);
            }
        }
        return ~sum;
    };
    const auto chunk = [&](const std::string& type, const std::string& data) {
        return big(static_cast<std::uint32_t>(data.size())) + type + data + big(crc(type + data));
    };
    const std::string row = std::string(1, '\0') + std::string(width, static_cast<char>(grey));
    std::string raw;
    for (std::uint32_t y = 0; y < height; ++y) {
        raw += row;
    }
    std::uint32_t a = 1;
    std::uint32_t b = 0;
    for (const char byte : raw) {
        a = (a + static_cast<std::uint8_t>(byte)) % 65521;
        b = (b + a) % 65521;
    }
    const auto size = static_cast<std::uint16_t>(raw.size());
    const auto inverse = static_cast<std::uint16_t>(~size);
    const std::string stored = std::string("\x78\x01\x01", 3) + static_cast<char>(size & 255) + static_cast<char>(size >> 8) +
                               static_cast<char>(inverse & 255) + static_cast<char>(inverse >> 8) + raw + big((b << 16U) | a);
    return "\x89PNG\r\n\x1a\n" + chunk("IHDR", big(width) + big(height) + std::string("\x08\x00\x00\x00\x00", 5)) +
           chunk("IDAT", stored) + chunk("IEND", "");
}

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
    std::mutex gate;  // a run waits for it

private:
    class FakeLane : public Lane {
    public:
        explicit FakeLane(FakeEngine& engine) : engine_(engine), input_(3 * 8 * 16) {}
        float* input() override { return input_.data(); }
        void run(int /*batch*/) override {
            const std::lock_guard wait(engine_.gate);
            if (engine_.fails) {
                throw EngineError("device 3 at /dev/secret is lost");
            }
        }
        const void* output(std::size_t index) const override { return index == 0 ? boxes_.data() : scores_.data(); }

    private:
        FakeEngine& engine_;
        std::vector<float> input_;
        std::vector<float> boxes_{0, 0, 4, 4, 8.3F, 2, 16, 8, 0, 0, 1, 1};
        std::vector<float> scores_{0.9F, 0, 0, 0.1234567F, 0, 0};
    };

    std::vector<OutputSpec> outputs_;
};

// A service on a fake engine.
struct Serving {
    explicit Serving(ServiceOptions options = {}, DetectorOptions detecting = {}) {
        detecting.max_delay = 0us;
        detector = std::make_shared<Detector>(manifest, engine, detecting);
        service.emplace(options, [this] { return detector; }, log, metrics);
    }

    ~Serving() {
        service.reset();
        detector.reset();
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
        service->handle(std::move(request), [promise](Service::Answer answer) { promise->set_value(answer()); });
        return promise->get_future();
    }

    Response detect(const std::string& body, const std::string& query = "", const std::string& type = "image/png") {
        return call({{"POST", "/v1/detect" + query, type, "", {}, false}, body});
    }

    Response get(const std::string& target, const std::string& method = "GET") {
        return call({{method, target, "", "", {}, false}, ""});
    }

    Manifest manifest = parse_manifest(manifest_json().dump());
    std::shared_ptr<FakeEngine> engine = std::make_shared<FakeEngine>(manifest);
    std::shared_ptr<Detector> detector;
    Log log{Level::error, false};
    Metrics metrics;
    std::optional<Service> service;
};

std::string error_type(const Response& response) { return Json::parse(response.body)["error"]["type"]; }
std::string message(const Response& response) { return Json::parse(response.body)["error"]["message"]; }

}  // namespace

TEST_CASE("a body in parts is taken apart", "[multipart]") {
    const std::string body = "preamble\r\n" + part("b", file_header + "\r\nContent-Type: image/JPEG; x=y", "one\r\n--bogus") +
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
    const auto parts = parse_multipart(part("b", file_header, data) + "--b-- \t", "b");
    REQUIRE(parts.size() == 1);
    CHECK(parts[0].body == data);
}

TEST_CASE("names are unquoted as browsers quote them", "[multipart]") {
    const auto name_of = [](const std::string& parameter) {
        return parse_multipart(part("b", "Content-Disposition: form-data; " + parameter, "") + "--b--", "b")[0].filename;
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
        {part("b", "Content-Disposition: attachment; filename=x", "x") + "--b--", "no 'Content-Disposition: form-data'"},
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
         {"", "; boundary", "; boundary=", "; boundary=\"a ", "; boundary=\"a \"", "; boundary=a\xff", "; boundary=a; boundary=b"}) {
        CAPTURE(bad);
        CHECK_THROWS_AS(multipart_boundary("multipart/form-data" + bad), MultipartError);
    }
    CHECK_THROWS_AS(multipart_boundary("multipart/form-data; boundary=" + std::string(71, 'a')), MultipartError);
}

TEST_CASE("a query is decoded", "[service]") {
    using Words = std::vector<std::pair<std::string, std::string>>;
    CHECK(parse_query("").empty());
    CHECK(parse_query("a=1&&b=%41%2b+%zz&c").size() == 0);
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
