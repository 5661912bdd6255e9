// In place of grpc_server.cpp, where the program is built without gRPC.
#include "grpc_server.hpp"
#include "trtdet/errors.hpp"

namespace trtdet::serve {

class GrpcServer::Impl {};

GrpcServer::GrpcServer(const GrpcOptions& /*options*/, Service& /*service*/, Log& /*log*/) {
    throw Error("--grpc-port: this program was built without gRPC; build it with -DTRTDET_GRPC=ON");
}

GrpcServer::~GrpcServer() = default;

void GrpcServer::serve() {}

std::string GrpcServer::address() const {
    return {};
}

bool GrpcServer::stop() {
    return true;
}

}  // namespace trtdet::serve
