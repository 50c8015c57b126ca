#include "engine/fork.h"

#include <mutex>
#include <pthread.h>

namespace retrograd {

void register_fork_handlers() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(
        [] {
          fork_part::install_before();
          fork_part::stats_before();
        },
        [] {
          fork_part::stats_after_in_parent();
          fork_part::install_after();
        },
        [] {
          fork_part::stats_after_in_child();
          fork_part::install_after();
          fork_part::plan_cache_after_in_child();
          fork_part::retained_after_in_child();
          fork_part::helpers_after_in_child();
        });
  });
}

}  // namespace retrograd
