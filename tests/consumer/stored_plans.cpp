// Runs fused plans that Python processes put into the plan store (make_plans.py), in a process without Python: one
// thread, and then two at once, train a model each, with changing batch sizes, and every gradient is compared with the
// stock engine's. Exit status: 0 all calls ran fused with the stock engine's gradients, 1 not.
#include <array>
#include <cstdlib>
#include <dlfcn.h>
#include <iostream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/torch.h>

#include <retrograd/plan_store.h>
#include <retrograd/retrograd.h>

namespace {

constexpr int kThreads = 2;
constexpr int kSteps = 50;
constexpr std::array<int64_t, 4> kBatches = {8, 12, 20, 33};

bool check(bool ok, std::string_view what) {
  if (!ok) std::cerr << "stored_plans: " << what << '\n';
  return ok;
}

// The gradients of kSteps steps, in order.
std::vector<torch::Tensor> train(int thread) {
  at::set_num_threads(1);  // a plan is for the number that it was made with, which is a property of each thread
  torch::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(thread));
  torch::nn::Sequential model(torch::nn::Linear(16, 32), torch::nn::Tanh(), torch::nn::Linear(32, 32),
                              torch::nn::ReLU(), torch::nn::Linear(32, 1));
  {
    const torch::NoGradGuard off;
    for (torch::Tensor& parameter : model->parameters()) parameter.uniform_(-0.3, 0.3, generator);
  }
  std::vector<torch::Tensor> gradients;
  for (int step = 0; step < kSteps; ++step) {
    model->zero_grad();
    const torch::Tensor x = torch::randn({kBatches.at(static_cast<size_t>(step) % kBatches.size()), 16}, generator);
    model->forward(x).pow(2).mean().backward();  // x * 0.5 would be another node than Python's
    for (const torch::Tensor& parameter : model->parameters()) gradients.push_back(parameter.grad().clone());
  }
  return gradients;
}

}  // namespace

int main() {
  bool ok = check(dlsym(RTLD_DEFAULT, "Py_IsInitialized") == nullptr, "there is Python in this process.");
  std::string why_not;
  ok &= check(retrograd::has_plan_store(&why_not), "there is no plan store: " + why_not);
  std::array<std::vector<torch::Tensor>, kThreads> stock, ours;
  for (int t = 0; t < kThreads; ++t) stock.at(t) = train(t);

  retrograd::install();
  retrograd::set_default(retrograd::Options().backend(retrograd::Backend::kInductor));
  // One thread loads the plans: while one does, calls of others for the same plan run node by node.
  ok &= check(train(0).size() == stock.at(0).size(), "the first run has another number of gradients.");
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) threads.emplace_back([&, t] { ours.at(t) = train(t); });
  for (std::thread& thread : threads) thread.join();
  const retrograd::Stats stats = retrograd::stats();
  retrograd::uninstall();

  for (int t = 0; t < kThreads; ++t) {
    ok &= check(stock.at(t).size() == ours.at(t).size(), "the runs have different numbers of gradients.");
    for (size_t i = 0; ok && i < stock.at(t).size(); ++i) {
      ok = check(torch::allclose(stock.at(t)[i], ours.at(t)[i], 1e-4, 1e-6),
                 "a gradient differs from the stock engine's.");
    }
  }
  ok &= check(stats.fused_calls == (1 + kThreads) * kSteps, "not every backward call ran fused.");
  ok &= check(stats.unfused_groups == 0, "a group ran node by node.");
  ok &= check(stats.plans_from_store >= 2 && stats.plans == 0 && stats.recordings == 0,
              "the plans did not come from the store.");
  ok &= check(dlsym(RTLD_DEFAULT, "Py_IsInitialized") == nullptr, "a plan brought Python into this process.");
  if (!ok) return EXIT_FAILURE;
  std::cout << "stored_plans: " << stats.fused_calls << " calls, most of them on " << kThreads
            << " threads at once, ran fused, without Python, gradients as the stock engine's; plans from the store "
            << stats.plans_from_store << '\n';
  return EXIT_SUCCESS;
}
