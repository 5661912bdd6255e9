// What stands in the text of HTTP/1.1: the head of a request, and that of an answer.
#pragma once

#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>
#include <memory>
#include <optional>
#include <string>

#include "request.hpp"

namespace trtdet::serve {

using RequestParser = boost::beast::http::request_parser<boost::beast::http::string_body>;

// Bytes of a request's first line and header fields.
constexpr std::size_t max_header = 16 * 1024;

// What is known of a request whose header was parsed. peer: the client's address and port.
Head head_of(const RequestParser& parser, const std::string& peer, const std::shared_ptr<Client>& client);

// What is wrong with the header by HTTP itself, whatever the request is for; the connection ends with this answer.
std::optional<Response> check_header(const RequestParser& parser);

// Whether a body follows the header.
bool has_body(const Head& head);

// The status line and all header fields of an answer, with the empty line that ends them.
std::string header_text(const Response& response, bool keep_alive);

// A whole answer, header and body, for where there is no memory to make one.
std::string answer_without_memory();

}  // namespace trtdet::serve
