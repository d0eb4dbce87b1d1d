// The version of Sluice: of the daemon, its libraries and its wire contract alike.

#ifndef SERVER_BASE_VERSION_H_
#define SERVER_BASE_VERSION_H_

namespace sluice {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace sluice

#endif  // SERVER_BASE_VERSION_H_
