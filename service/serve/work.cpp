#include "work.hpp"

#include <algorithm>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "encoding.hpp"
#include "heap_meter.hpp"
#include "memory_budget.hpp"
#include "trtdet/errors.hpp"
#include "workers.hpp"

namespace trtdet::serve {
namespace {

// Bytes that a decoder takes without being charged for: its own small things, before and beside the image.
constexpr std::size_t decoder_allowance = 1U << 20U;

}  // namespace

Work::Work(std::shared_ptr<Context> context, Served& model, std::unique_ptr<Place> place, Request request, Done done)
    : context_(std::move(context)),
      model_(model),
      request_(std::move(request)),
      client_(client_of(request_.head)),
      detector_(model_.current()),
      place_(std::move(place)),
      done_(std::move(done)) {}

void Work::start(std::size_t images) {
    if (const auto most = context_->options.max_client_images; client_->images + images > most) {
        return refuse(client_response(
            "you would have more than the " + std::to_string(most) +
            " images in work that one client may have (--queue, --max-client-percent); try again later"));
    }
    outcomes_.resize(images);
    client_->images += images;
    // Each is prepared and handed over by one thread, and detected by another.
    waiting_ = 2 * images;
    first_failed_ = images;
    for (std::size_t i = 0; i < images; ++i) {
        try {
            post([self = shared_from_this(), i] { self->run(i); });
        } catch (...) {
            settle(i, {{}, std::current_exception()});
            finish();
        }
    }
}

Image Work::decode(std::string_view file, MemoryBudget::Share& memory) const {
    const bool turns = context_->options.exif_orientation;
    const int orientation = turns ? exif_orientation(file) : 1;
    const DecodeHooks hooks{
        [&](std::size_t bytes) {
            // Turning takes the image a second time, and no more than decoding did.
            memory.wait_for(orientation == 1 ? bytes : 2 * bytes, deadline());
        },
        [this] { return wanted(); }};
    // What the decoder takes beside what it is known to need, tables above all, is charged as it takes it.
    std::optional<HeapMeter> meter(std::in_place, [&memory](std::size_t taken) {
        return taken <= memory.bytes() + decoder_allowance || memory.try_set(taken);
    });
    try {
        auto image = decode_image(file, context_->options.limits, hooks);
        meter.reset();
        return upright(std::move(image), orientation);
    } catch (const std::exception&) {
        // Not every decoder says that it had no memory.
        if (meter && meter->refused()) {
            throw memory.refusal(meter->refused_bytes());
        }
        throw;
    }
}

bool Work::unpack() {
    if (!is_packed()) {
        return true;
    }
    const auto memory = std::make_shared<MemoryBudget::Share>(context_->bodies, client_);
    const auto hold = [&](std::uint64_t bytes) {
        if (!wanted()) {
            throw DeadlineError("the time for the answer was over while the body was unpacked");
        }
        memory->set(bytes);
    };
    try {
        request_.body = unpacked(request_.body, request_.head.content_encoding, context_->options.max_body, hold);
        request_.held = memory;
        return true;
    } catch (const EncodingError& error) {
        refuse(error_response(400, "bad-encoding", error.what()));
    } catch (const BodyTooLargeError& error) {
        refuse(error_response(413, "body-too-large", error.what()));
    } catch (const MemoryLimitError& error) {
        refuse(error.response());
    } catch (const DeadlineError& error) {
        refuse(error_response(504, "deadline-exceeded", error.what()));
    }
    return false;
}

void Work::release_body() {
    request_.body = {};
    request_.held = nullptr;
}

void Work::post(std::function<void()> task) {
    context_->workers->post(client_->number, std::move(task));
}

void Work::run(std::size_t index) noexcept {
    try {
        if (index > first_failed_ && all_or_nothing()) {
            throw StoppedError("not tried: an image before this one failed");
        }
        if (!wanted()) {
            throw DeadlineError("the time for the answer was over before the image was decoded");
        }
        const auto begin = Clock::now();
        prepare(index);
        preparing_ += (Clock::now() - begin).count();
    } catch (const std::bad_alloc&) {
        settle(index, {{}, context_->no_memory});
    } catch (...) {
        settle(index, {{}, std::current_exception()});
    }
    finish();
}

std::function<void(Outcome)> Work::settled(std::size_t index) {
    return [self = shared_from_this(), index](Outcome outcome) {
        // Here and not with the answer, which nobody may be waiting for any more.
        self->model_.health.note(outcome, Clock::now() < self->deadline());
        if (!outcome.error) {
            self->model_.statistics.image(outcome.found.ran, outcome.found.batch);
        }
        if (outcome.error || !self->has_more()) {
            self->settle(index, std::move(outcome));
        } else {
            self->complete_later(index, std::move(outcome));
        }
    };
}

void Work::complete_later(std::size_t index, Outcome outcome) noexcept {
    try {
        const auto held = std::make_shared<Outcome>(std::move(outcome));
        post([self = shared_from_this(), index, held] {
            try {
                self->complete(index, held->found);
            } catch (const std::bad_alloc&) {
                held->error = self->context_->no_memory;
            } catch (...) {
                held->error = std::current_exception();
            }
            self->settle(index, std::move(*held));
        });
    } catch (...) {
        settle(index, {{}, context_->no_memory});
    }
}

void Work::settle(std::size_t index, Outcome outcome) noexcept {
    outcomes_[index] = std::move(outcome);
    --client_->images;
    if (outcomes_[index].error) {
        auto first = first_failed_.load();
        while (index < first && !first_failed_.compare_exchange_weak(first, index)) {
        }
    }
    finish();
}

void Work::finish() noexcept {
    if (--waiting_ != 0) {
        return;
    }
    count();
    try {
        done_([self = shared_from_this()] { return self->finished(); });
    } catch (...) {
        end_without_memory();
    }
}

void Work::count() const {
    const auto took = Clock::now() - request_.arrived;
    if (failed()) {
        return model_.statistics.failed(took);
    }
    ImageTimes times{Clock::duration(preparing_), {}, {}};
    for (const auto& outcome : outcomes_) {
        times.queue += outcome.found.queued;
        times.infer += outcome.found.ran;
    }
    for (auto* const time : {&times.input, &times.queue, &times.infer}) {
        *time /= static_cast<Clock::rep>(std::max<std::size_t>(1, outcomes_.size()));
    }
    // The run may begin before the thread that prepared its image goes on.
    times.input = std::clamp(took - times.queue - times.infer, Clock::duration(), times.input);
    model_.statistics.succeeded(took, times);
}

void Work::end_without_memory() noexcept {
    place_.reset();
    // Without a capture, so that nothing is allocated for it. Whoever asks for an answer and gets this has one ready.
    done_([]() -> Response { throw std::bad_alloc(); });
}

Response Work::finished() {
    // Makes room for another request, before the client that waits for this one can send it.
    place_.reset();
    return answer();
}

void Work::refuse(Response response) {
    model_.statistics.failed(Clock::now() - request_.arrived);
    place_.reset();
    done_([response = std::move(response)] { return response; });
}

Response Work::failure(std::size_t index) const {
    try {
        std::rethrow_exception(outcomes_[index].error);
    } catch (const ImageTooLargeError& error) {
        return error_response(413, "image-too-large", which(index) + error.what());
    } catch (const ImageError& error) {
        return error_response(400, "bad-image", which(index) + error.what());
    } catch (const MemoryLimitError& error) {
        return error.response();
    } catch (const OverloadedError& error) {
        return busy_response("overloaded", error.what());
    } catch (const DeadlineError& error) {
        return error_response(504, "deadline-exceeded", error.what());
    } catch (const StoppedError&) {
        return busy_response("stopping", "the service is stopping; send the request again");
    } catch (const EngineError& error) {
        context_->log.write(
            Level::error, "the engine failed", {{"reason", error.what()}, {"request_id", request_.head.request_id}});
        // The reason may name files and devices, which are not the client's.
        return error_response(500, "engine-failed", "the engine failed; the reason is in the service's log");
    } catch (const std::bad_alloc&) {
        context_->log.write(Level::error, "there is no memory for a request");
        return busy_response("overloaded", "there is no memory for the request; try again later");
    } catch (const std::exception& error) {
        context_->log.write(
            Level::error, "a request failed", {{"reason", error.what()}, {"request_id", request_.head.request_id}});
        return error_response(500, "internal", "the request failed; the reason is in the service's log");
    }
}

}  // namespace trtdet::serve
