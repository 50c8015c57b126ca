// What a forked child needs: locks that no vanished thread holds, and a cache that no vanished thread was in.
#pragma once

namespace retrograd {

// Registers the handlers with pthread_atfork, once; called by the first install().
void register_fork_handlers();

// The parts, each implemented beside what it protects. Between before and after no other thread holds the lock.
namespace fork_part {
void stats_before();
void stats_after_in_parent();
void stats_after_in_child();  // also lets go of the counters of threads that are gone
void install_before();
void install_after();
void plan_cache_after_in_child();
void retained_after_in_child();
void helpers_after_in_child();
}  // namespace fork_part

}  // namespace retrograd
