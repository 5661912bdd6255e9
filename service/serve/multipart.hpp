// multipart/form-data (RFC 7578) over RFC 2046: the body of a request that carries several files.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace trtdet::serve {

// A body or a header that is not what the RFCs say; the message is one line, with nothing of the body's bytes in it.
class MultipartError : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

// More parts than are allowed.
class TooManyPartsError : public MultipartError {
public:
    using MultipartError::MultipartError;
};

struct Part {
    std::string name;          // of the form's field, as the client wrote it: any bytes
    std::string filename;      // empty where there is none
    std::string content_type;  // without its parameters, in small letters; empty where there is none
    std::string_view body;     // within the body that was parsed
};

struct MultipartLimits {
    std::size_t max_parts = 32;
    std::size_t max_header_bytes = 8192;  // of one part
};

// The media type of a Content-Type header, without its parameters and in small letters.
std::string media_type(std::string_view content_type);

// The boundary that a Content-Type header names, its quotes taken away.
//
// Throws MultipartError: there is none, or it is not 1 to 70 characters of those that RFC 2046 allows.
std::string multipart_boundary(std::string_view content_type);

// The parts of a body, in their order.
//
// A delimiter is a line of its own: '--', the boundary, spaces or tabs. Whatever else holds the boundary is data. What
// stands before the first delimiter and after the last is left out.
//
// Throws MultipartError: the closing delimiter is missing (the body was cut), there is no part, the header of a part is
// malformed, too long, or not Content-Disposition: form-data, or a part is encoded (base64, quoted-printable).
// TooManyPartsError: there are more than the limit.
std::vector<Part> parse_multipart(std::string_view body, std::string_view boundary, const MultipartLimits& limits = {});

}  // namespace trtdet::serve
