// Names for clang's thread-safety attributes, so that lock discipline stands in the types and
// `clang++ -Wthread-safety` checks it. Other compilers see nothing.
#pragma once

#if defined(__clang__)
#define RETROGRAD_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define RETROGRAD_THREAD_ANNOTATION(x)
#endif

#define RETROGRAD_CAPABILITY(name) RETROGRAD_THREAD_ANNOTATION(capability(name))
#define RETROGRAD_SCOPED_CAPABILITY RETROGRAD_THREAD_ANNOTATION(scoped_lockable)
#define RETROGRAD_GUARDED_BY(mutex) RETROGRAD_THREAD_ANNOTATION(guarded_by(mutex))
#define RETROGRAD_PT_GUARDED_BY(mutex) RETROGRAD_THREAD_ANNOTATION(pt_guarded_by(mutex))
#define RETROGRAD_REQUIRES(...) RETROGRAD_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define RETROGRAD_EXCLUDES(...) RETROGRAD_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define RETROGRAD_ACQUIRE(...) RETROGRAD_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define RETROGRAD_RELEASE(...) RETROGRAD_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
