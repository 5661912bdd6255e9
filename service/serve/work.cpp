#include "work.hpp"

#include <exception>
#include <new>
#include <utility>

#include "memory_budget.hpp"
#include "trtdet/errors.hpp"
#include "workers.hpp"

namespace trtdet::serve {

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
        prepare(index);
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
    try {
        done_([self = shared_from_this()] { return self->finished(); });
    } catch (...) {
        end_without_memory();
    }
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
