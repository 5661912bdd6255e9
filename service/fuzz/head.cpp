// Any bytes are the head of a request with safe words, or an error of HTTP; what a target holds is split, decoded and
// looked up, or a BadQuery of one line.
#include <boost/asio/buffer.hpp>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "http_message.hpp"
#include "router.hpp"

namespace {

using trtdet::serve::Words;

void check(bool good) {
    if (!good) {
        std::abort();
    }
}

bool one_line(std::string_view text) {
    return text.find_first_of(std::string_view("\r\n\0", 3)) == std::string_view::npos;
}

void check_target(std::string_view whole) {
    const auto target = trtdet::serve::split_target(whole);
    try {
        for (const auto& [key, value] : trtdet::serve::parse_query(target.query)) {
            check(key.size() + value.size() <= target.query.size());
        }
    } catch (const trtdet::serve::BadQuery& error) {
        check(one_line(error.what()));
    }
}

trtdet::serve::Endpoint endpoint(std::string path, std::string allow) {
    trtdet::serve::Endpoint made;
    made.path = std::move(path);
    made.allow = std::move(allow);
    made.refuse = [](const trtdet::serve::Head& head, const Words& words) {
        check(words.size() <= 2);
        for (const auto& word : words) {
            check(!word.empty());
        }
        return trtdet::serve::refuse_body(head, 1000);
    };
    return made;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const trtdet::serve::Router router(
        {endpoint("/v1/detect", "POST"), endpoint("/v2/models/{model}/versions/{version}/infer", "POST"),
         endpoint("/", "GET, HEAD")});
    trtdet::serve::RequestParser parser;
    parser.header_limit(static_cast<std::uint32_t>(trtdet::serve::max_header));
    parser.body_limit(boost::none);
    boost::system::error_code error;
    parser.put(boost::asio::buffer(data, size), error);
    if (!parser.is_header_done()) {
        return 0;
    }
    const auto head = trtdet::serve::head_of(parser, "127.0.0.1:1", nullptr);
    check(!head.request_id.empty() && head.request_id.size() <= 128 && one_line(head.request_id));
    check(head.traceparent.empty() || (head.traceparent.size() == 55 && one_line(head.traceparent)));
    check(one_line(head.target) && one_line(head.method) && one_line(head.content_type));
    // A body has one length.
    check(!head.chunked || !head.length);
    check_target(head.target);
    auto response = trtdet::serve::check_header(parser);
    if (!response) {
        response = router.refuse(head);
    }
    if (response) {
        check(response->status >= 400 && one_line(response->message) && !response->error.empty());
        response->headers.emplace_back("X-Request-Id", head.request_id);
        const auto text = trtdet::serve::header_text(*response, false);
        // Nothing of the client ends a line.
        std::size_t lines = 0;
        for (std::size_t at = 0; (at = text.find('\n', at)) != std::string::npos; ++at) {
            ++lines;
        }
        check(lines == 7 + response->headers.size());
    }
    return 0;
}
