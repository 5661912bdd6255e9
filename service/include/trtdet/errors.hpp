// What libtrtdet throws on purpose.
//
//     Error                     every error a caller can cause or meet
//     ├── BundleError           a bundle that is incomplete, altered, of another schema, or not what it says
//     ├── ImageError            bytes that are no image, or a damaged one
//     │   └── ImageTooLargeError    an image with more pixels than are allowed
//     ├── EngineError           an engine that cannot be opened or run
//     │   └── UnavailableError      this machine or this libtrtdet lacks what the engine needs
//     ├── OverloadedError       the queue is full; trying again later may help
//     ├── DeadlineError         the time that was given for an answer is over
//     └── StoppedError          the detector takes no more images
//
// Each message is one line: what was wrong, what was got, what is allowed, what to do next. Beside these, only
// std::bad_alloc and std::system_error (no thread to be had) leave the library.
#pragma once

#include <stdexcept>
#include <string>

#include "trtdet/export.hpp"

namespace trtdet {

class TRTDET_API Error : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

class TRTDET_API BundleError : public Error {
public:
    using Error::Error;
};

class TRTDET_API ImageError : public Error {
public:
    using Error::Error;
};

class TRTDET_API ImageTooLargeError : public ImageError {
public:
    using ImageError::ImageError;
};

class TRTDET_API EngineError : public Error {
public:
    using Error::Error;
};

class TRTDET_API UnavailableError : public EngineError {
public:
    using EngineError::EngineError;
};

class TRTDET_API OverloadedError : public Error {
public:
    using Error::Error;
};

class TRTDET_API DeadlineError : public Error {
public:
    using Error::Error;
};

class TRTDET_API StoppedError : public Error {
public:
    using Error::Error;
};

}  // namespace trtdet
