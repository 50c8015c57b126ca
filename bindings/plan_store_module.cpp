#include "bindings/plan_store_module.h"

#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <pybind11/stl/filesystem.h>

#include "cache/plan_store.h"

namespace py = pybind11;

namespace retrograd::bindings {
namespace {

using namespace py::literals;
using cache::PlanStore;
using cache::Reservation;
using cache::StoredPlan;

// The store waits for disks and for other processes, and needs no Python.
using NoGil = py::gil_scoped_release;

cache::KeyView view(const py::bytes& bytes) {
  const std::string_view text = bytes;
  return std::as_bytes(std::span(text.data(), text.size()));
}

// Environments are UTF-8 as published; of a damaged record, what can be shown.
py::str text(const std::string& utf8) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(utf8.data(), static_cast<Py_ssize_t>(utf8.size()), "replace"));
}

py::object plan_of(PlanStore::Result& result) {
  return result.plan ? py::cast(std::make_unique<StoredPlan>(std::move(*result.plan))) : py::none();
}

py::tuple find(const PlanStore& store, const py::bytes& key, const std::string& environment) {
  PlanStore::Result result;
  {
    const cache::KeyView bytes = view(key);
    const NoGil no_gil;
    result = store.find(bytes, environment);
  }
  return py::make_tuple(plan_of(result), text(result.reason));
}

py::tuple publish(const PlanStore& store, const py::bytes& key, const std::string& environment,
                  const std::filesystem::path& library, const py::bytes& metadata) {
  PlanStore::Result result;
  {
    const cache::KeyView bytes = view(key);
    const std::string_view content = metadata;
    const NoGil no_gil;
    result = store.publish(bytes, environment, library, content);
  }
  return py::make_tuple(plan_of(result), result.added, text(result.reason));
}

// In slices, so that Ctrl-C ends it.
Reservation reserve(const PlanStore& store, const py::bytes& key, const std::string& environment, double timeout) {
  using Clock = std::chrono::steady_clock;
  constexpr double kForever = 1e9;
  constexpr std::chrono::milliseconds kSlice(100);
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(std::clamp(timeout, 0.0, kForever)));
  const cache::KeyView bytes = view(key);
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now());
    auto reservation = [&] {
      const NoGil no_gil;
      return store.reserve(bytes, environment, std::clamp(left, std::chrono::milliseconds(0), kSlice));
    }();
    if (reservation.held() || !reservation.reason().empty() || Clock::now() >= end) {
      return reservation;
    }
    if (PyErr_CheckSignals() != 0) {
      throw py::error_already_set();
    }
  }
}

py::tuple list(const PlanStore& store) {
  PlanStore::Listing listing;
  {
    const NoGil no_gil;
    listing = store.list();
  }
  py::list entries;
  for (const PlanStore::Entry& entry : listing.entries) {
    entries.append(py::dict("name"_a = entry.name, "bytes"_a = entry.bytes,
                            "last_use"_a = std::chrono::duration<double>(entry.last_use.time_since_epoch()).count(),
                            "environment"_a = text(entry.environment), "metadata"_a = py::bytes(entry.metadata),
                            "problem"_a = text(entry.problem)));
  }
  return py::make_tuple(entries, text(listing.reason));
}

py::dict clear(const PlanStore& store) {
  PlanStore::Cleared cleared;
  {
    const NoGil no_gil;
    cleared = store.clear();
  }
  return py::dict("plans"_a = cleared.plans, "bytes"_a = cleared.bytes, "leased"_a = cleared.leased,
                  "reason"_a = text(cleared.reason));
}

py::dict verify(const PlanStore& store, bool remove) {
  PlanStore::Verified verified;
  {
    const NoGil no_gil;
    verified = store.verify(remove);
  }
  py::list bad;
  for (const PlanStore::BadEntry& entry : verified.bad) {
    bad.append(py::dict("name"_a = entry.name, "reason"_a = text(entry.reason), "removed"_a = entry.removed));
  }
  return py::dict("good"_a = verified.good, "bad"_a = bad, "reason"_a = text(verified.reason));
}

}  // namespace

void add_plan_store(py::module_& m) {
  py::class_<StoredPlan>(m, "StoredPlan")
      .def_property_readonly("library", [](const StoredPlan& plan) { return py::cast(plan.library); })
      .def_property_readonly("metadata", [](const StoredPlan& plan) { return py::bytes(plan.metadata); })
      .def("release", [](StoredPlan& plan) { plan.lease.release(); });
  py::class_<Reservation>(m, "Reservation")
      .def_property_readonly("held", &Reservation::held)
      .def_property_readonly("reason", [](const Reservation& reservation) { return text(reservation.reason()); })
      .def("release", &Reservation::release);
  py::class_<PlanStore>(m, "PlanStore")
      .def(py::init([](const std::filesystem::path& folder, std::optional<uint64_t> max_bytes,
                       std::optional<size_t> max_plans) {
             const PlanStore::Limits usual = PlanStore::default_limits();
             return std::make_unique<PlanStore>(folder,
                                                PlanStore::Limits{.max_bytes = max_bytes.value_or(usual.max_bytes),
                                                                  .max_plans = max_plans.value_or(usual.max_plans)});
           }),
           "folder"_a, "max_bytes"_a = py::none(), "max_plans"_a = py::none())
      .def_static("default_folder", &PlanStore::default_folder)
      .def_property_readonly("folder", [](const PlanStore& store) { return py::cast(store.folder()); })
      .def_property_readonly("max_bytes", [](const PlanStore& store) { return store.limits().max_bytes; })
      .def_property_readonly("max_plans", [](const PlanStore& store) { return store.limits().max_plans; })
      // What is wrong with the limit in the environment; empty: nothing.
      .def_static("limit_problem",
                  [] {
                    std::string problem;
                    PlanStore::default_limits(&problem);
                    return text(problem);
                  })
      .def("problem", &PlanStore::problem, py::call_guard<NoGil>())
      .def("find", &find, "key"_a, "environment"_a)
      .def("publish", &publish, "key"_a, "environment"_a, "library"_a, "metadata"_a)
      .def("reserve", &reserve, "key"_a, "environment"_a, "timeout"_a = 0.0)
      .def("list", &list)
      .def("clear", &clear)
      .def("verify", &verify, "remove"_a = false);
}

}  // namespace retrograd::bindings
