// The services of proto/sluice/v1. Each is in NAME_service.cc and does no more than parse, call the
// core and reply.

#ifndef SERVER_RPC_SERVICES_H_
#define SERVER_RPC_SERVICES_H_

#include <memory>

#include "grpcpp/impl/codegen/service_type.h"
#include "server/rpc/service_context.h"

namespace sluice {

// The context must outlive the service.
std::unique_ptr<grpc::Service> NewSessionService(ServiceContext* context);
std::unique_ptr<grpc::Service> NewSequenceService(ServiceContext* context);
std::unique_ptr<grpc::Service> NewSwapService(ServiceContext* context);
std::unique_ptr<grpc::Service> NewAttentionService(ServiceContext* context);
std::unique_ptr<grpc::Service> NewAdminService(ServiceContext* context);

}  // namespace sluice

#endif  // SERVER_RPC_SERVICES_H_
