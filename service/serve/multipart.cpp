#include "multipart.hpp"

#include <algorithm>
#include <cctype>
#include <optional>
#include <utility>

namespace trtdet::serve {
namespace {

constexpr std::string_view crlf = "\r\n";
constexpr auto npos = std::string_view::npos;

char lower(char letter) {
    return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter;
}

std::string lowered(std::string_view text) {
    std::string result(text);
    std::transform(result.begin(), result.end(), result.begin(), lower);
    return result;
}

bool equal_ignoring_case(std::string_view a, std::string_view b) {
    return lowered(a) == lowered(b);
}

bool is_space(char letter) {
    return letter == ' ' || letter == '\t';
}

std::string_view trimmed(std::string_view text) {
    while (!text.empty() && is_space(text.front())) {
        text.remove_prefix(1);
    }
    while (!text.empty() && is_space(text.back())) {
        text.remove_suffix(1);
    }
    return text;
}

// Takes 'name=value' with its leading semicolon off the front of a header's parameters; the value may be quoted.
// Nothing where there are no more; throws where what is left is no parameter.
std::optional<std::pair<std::string, std::string>> take_parameter(std::string_view& rest) {
    rest = trimmed(rest);
    while (!rest.empty() && rest.front() == ';') {
        rest = trimmed(rest.substr(1));
    }
    if (rest.empty()) {
        return std::nullopt;
    }
    const auto equals = rest.find('=');
    const auto semicolon = rest.find(';');
    if (equals == npos || semicolon < equals) {
        throw MultipartError("a header's parameter has no value; expected name=value");
    }
    std::pair<std::string, std::string> parameter{lowered(trimmed(rest.substr(0, equals))), {}};
    rest = trimmed(rest.substr(equals + 1));
    if (rest.empty() || rest.front() != '"') {
        const auto end = std::min(rest.find(';'), rest.size());
        parameter.second = trimmed(rest.substr(0, end));
        rest.remove_prefix(end);
        return parameter;
    }
    for (std::size_t at = 1; at < rest.size(); ++at) {
        if (rest[at] == '"') {
            rest.remove_prefix(at + 1);
            rest = trimmed(rest);
            if (!rest.empty() && rest.front() != ';') {
                throw MultipartError("a header has text after a quoted value; expected ';' or the end of the line");
            }
            return parameter;
        }
        // Browsers write %22 for a quote and leave a backslash as it is, so only what must be escaped is unescaped.
        if (rest[at] == '\\' && at + 1 < rest.size() && (rest[at + 1] == '"' || rest[at + 1] == '\\')) {
            ++at;
        }
        parameter.second.push_back(rest[at]);
    }
    throw MultipartError("a quoted value in a header has no end");
}

// The delimiter lines of a body, found one after the other.
class Delimiters {
public:
    struct Found {
        std::size_t begin = 0;  // where what stands before it ends
        std::size_t end = 0;    // where what comes after it begins
        bool last = false;
    };

    Delimiters(std::string_view body, std::string_view boundary)
        : body_(body), dash_boundary_("--" + std::string(boundary)) {}

    // The first delimiter that begins at `from`, which must be the start of a line, or after a line break that begins
    // at `from` or later.
    std::optional<Found> next(std::size_t from, bool at_line_start) const {
        if (at_line_start) {
            if (const auto found = match(from, from)) {
                return found;
            }
        }
        const std::string pattern = std::string(crlf) + dash_boundary_;
        for (std::size_t at = body_.find(pattern, from); at != npos; at = body_.find(pattern, at + crlf.size())) {
            if (const auto found = match(at + crlf.size(), at)) {
                return found;
            }
        }
        return std::nullopt;
    }

private:
    std::optional<Found> match(std::size_t dashes, std::size_t begin) const {
        if (body_.substr(dashes, dash_boundary_.size()) != dash_boundary_) {
            return std::nullopt;
        }
        std::size_t at = dashes + dash_boundary_.size();
        const bool last = body_.substr(at, 2) == "--";
        if (last) {
            at += 2;
        }
        while (at < body_.size() && is_space(body_[at])) {
            ++at;
        }
        if (body_.substr(at, crlf.size()) == crlf) {
            return Found{begin, at + crlf.size(), last};
        }
        // The last line of a body needs no line break.
        if (last && at == body_.size()) {
            return Found{begin, at, last};
        }
        return std::nullopt;
    }

    std::string_view body_;
    std::string dash_boundary_;
};

void read_header_line(std::string_view line, Part& part, bool& is_form_data) {
    const auto colon = line.find(':');
    if (colon == npos || colon == 0) {
        throw MultipartError("a part's header has a line without a name; expected 'Name: value'");
    }
    const auto name = line.substr(0, colon);
    auto value = trimmed(line.substr(colon + 1));
    if (equal_ignoring_case(name, "Content-Type")) {
        part.content_type = media_type(value);
    } else if (equal_ignoring_case(name, "Content-Transfer-Encoding")) {
        const auto encoding = lowered(value);
        if (encoding != "binary" && encoding != "8bit" && encoding != "7bit") {
            throw MultipartError(
                "a part has a Content-Transfer-Encoding; RFC 7578 has none: send the bytes as they are");
        }
    } else if (equal_ignoring_case(name, "Content-Disposition")) {
        if (is_form_data) {
            throw MultipartError("a part has two Content-Disposition lines");
        }
        const auto end = std::min(value.find(';'), value.size());
        is_form_data = equal_ignoring_case(trimmed(value.substr(0, end)), "form-data");
        value.remove_prefix(end);
        while (auto parameter = take_parameter(value)) {
            if (parameter->first == "name") {
                part.name = std::move(parameter->second);
            } else if (parameter->first == "filename") {
                part.filename = std::move(parameter->second);
            }
        }
    }
}

Part read_part(std::string_view content, const MultipartLimits& limits) {
    Part part;
    bool is_form_data = false;
    std::size_t at = 0;
    while (true) {
        const auto end = content.substr(0, limits.max_header_bytes).find(crlf, at);
        if (end == npos) {
            throw MultipartError(
                content.size() >= limits.max_header_bytes
                    ? "a part's header is longer than " + std::to_string(limits.max_header_bytes) + " bytes"
                    : "a part's header has no end; expected an empty line before its data");
        }
        const auto line = content.substr(at, end - at);
        at = end + crlf.size();
        if (line.empty()) {
            break;
        }
        read_header_line(line, part, is_form_data);
    }
    if (!is_form_data) {
        throw MultipartError("a part has no 'Content-Disposition: form-data' line");
    }
    part.body = content.substr(at);
    return part;
}

}  // namespace

std::string media_type(std::string_view content_type) {
    return lowered(trimmed(content_type.substr(0, content_type.find(';'))));
}

std::string multipart_boundary(std::string_view content_type) {
    const auto semicolon = std::min(content_type.find(';'), content_type.size());
    auto rest = content_type.substr(semicolon);
    std::optional<std::string> boundary;
    while (auto parameter = take_parameter(rest)) {
        if (parameter->first == "boundary") {
            if (boundary) {
                throw MultipartError("the Content-Type names two boundaries");
            }
            boundary = std::move(parameter->second);
        }
    }
    if (!boundary) {
        throw MultipartError("the Content-Type names no boundary; expected multipart/form-data; boundary=...");
    }
    constexpr std::string_view allowed = "'()+_,-./:=? ";
    const bool good = std::all_of(boundary->begin(), boundary->end(), [&](char letter) {
        return std::isalnum(static_cast<unsigned char>(letter)) != 0 || allowed.find(letter) != npos;
    });
    if (boundary->empty() || boundary->size() > 70 || boundary->back() == ' ' || !good) {
        throw MultipartError("the boundary is not 1 to 70 characters of letters, digits and '()+_,-./:=? and space");
    }
    return *boundary;
}

std::vector<Part> parse_multipart(std::string_view body, std::string_view boundary, const MultipartLimits& limits) {
    const Delimiters delimiters(body, boundary);
    auto delimiter = delimiters.next(0, true);
    if (!delimiter) {
        throw MultipartError("the body holds no line with the boundary that the Content-Type names");
    }
    std::vector<Part> parts;
    while (!delimiter->last) {
        // The line break that ended the delimiter may also begin the next one: a part without header and data.
        const auto begin = delimiter->end;
        const auto following = delimiters.next(begin, true);
        if (!following) {
            throw MultipartError("the body was cut: its closing boundary is missing");
        }
        if (parts.size() == limits.max_parts) {
            throw TooManyPartsError(
                "the body has more than " + std::to_string(limits.max_parts) + " parts; send them in several requests");
        }
        parts.push_back(read_part(body.substr(begin, following->begin - begin), limits));
        delimiter = following;
    }
    if (parts.empty()) {
        throw MultipartError("the body has no part; expected at least one image");
    }
    return parts;
}

}  // namespace trtdet::serve
