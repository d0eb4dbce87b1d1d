// Tells ThreadSanitizer what absl::Mutex orders. The distribution's Abseil is not instrumented, so
// that without this everything that gRPC hands from thread to thread under its locks would look
// like a race, and a test would spend its time on dropping such reports.
//
// A program that links this file defines the functions below itself, and the shared libraries call
// them in place of Abseil's own, to which each passes on. For --config=tsan alone.

#include <dlfcn.h>

#include <string>

#include "absl/base/config.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}

namespace absl {
ABSL_NAMESPACE_BEGIN
namespace {

// What Abseil does inside is its own business: only the order that it gives to others is kept.
class IgnoreAccesses {
 public:
  IgnoreAccesses() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~IgnoreAccesses() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
};

// Abseil's own function, by the mangled name that follows its inline namespace.
template <typename Function>
Function* Real(const char* mangled_tail) {
  const std::string name_space = ABSL_INTERNAL_INLINE_NAMESPACE_STR;
  const std::string name =
      "_ZN4absl" + std::to_string(name_space.size()) + name_space + mangled_tail;
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name.c_str()));
}

}  // namespace

void Mutex::Lock() {
  static const auto real = Real<void(Mutex*)>("5Mutex4LockEv");
  {
    IgnoreAccesses ignore;
    real(this);
  }
  __tsan_acquire(this);
}

bool Mutex::TryLock() {
  static const auto real = Real<bool(Mutex*)>("5Mutex7TryLockEv");
  IgnoreAccesses ignore;
  const bool locked = real(this);
  if (locked) __tsan_acquire(this);
  return locked;
}

void Mutex::Unlock() {
  static const auto real = Real<void(Mutex*)>("5Mutex6UnlockEv");
  __tsan_release(this);
  IgnoreAccesses ignore;
  real(this);
}

void Mutex::ReaderLock() {
  static const auto real = Real<void(Mutex*)>("5Mutex10ReaderLockEv");
  {
    IgnoreAccesses ignore;
    real(this);
  }
  __tsan_acquire(this);
}

void Mutex::ReaderUnlock() {
  static const auto real = Real<void(Mutex*)>("5Mutex12ReaderUnlockEv");
  __tsan_release(this);
  IgnoreAccesses ignore;
  real(this);
}

// A wait gives the lock away and takes it again.
void CondVar::Wait(Mutex* mutex) {
  static const auto real = Real<void(CondVar*, Mutex*)>("7CondVar4WaitEPNS0_5MutexE");
  __tsan_release(mutex);
  {
    IgnoreAccesses ignore;
    real(this, mutex);
  }
  __tsan_acquire(mutex);
}

bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  static const auto real = Real<bool(CondVar*, Mutex*, Duration)>(
      "7CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE");
  __tsan_release(mutex);
  bool timed_out;
  {
    IgnoreAccesses ignore;
    timed_out = real(this, mutex, timeout);
  }
  __tsan_acquire(mutex);
  return timed_out;
}

bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  static const auto real =
      Real<bool(CondVar*, Mutex*, Time)>("7CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE");
  __tsan_release(mutex);
  bool timed_out;
  {
    IgnoreAccesses ignore;
    timed_out = real(this, mutex, deadline);
  }
  __tsan_acquire(mutex);
  return timed_out;
}

ABSL_NAMESPACE_END
}  // namespace absl
