// Trains a small model twice, with the stock engine and with retrograd, and compares every gradient bit for bit.
// Exit status: 0 equal, 1 different or retrograd's schedule did not run.
#include <cstdlib>
#include <iostream>
#include <string_view>
#include <vector>

#include <torch/torch.h>

#include <retrograd/retrograd.h>

namespace {

constexpr int kSteps = 50;

struct Run {
  std::vector<torch::Tensor> gradients;  // of all steps, in order
  std::vector<float> losses;
};

Run train() {
  torch::manual_seed(7);
  torch::nn::Sequential model(torch::nn::Linear(16, 32), torch::nn::Tanh(), torch::nn::Linear(32, 32),
                              torch::nn::Tanh(), torch::nn::Linear(32, 1));
  const torch::Tensor x = torch::randn({64, 16});
  const torch::Tensor y = x.square().mean(1, /*keepdim=*/true);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  Run run;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss = torch::mse_loss(model->forward(x), y);
    loss.backward();
    for (const torch::Tensor& parameter : model->parameters()) run.gradients.push_back(parameter.grad().clone());
    run.losses.push_back(loss.item<float>());
    optimizer.step();
  }
  return run;
}

bool check(bool ok, std::string_view what) {
  if (!ok) std::cerr << "consumer: " << what << '\n';
  return ok;
}

}  // namespace

int main() {
  const Run stock = train();

  retrograd::install();
  retrograd::reset_stats();
  Run ours;
  {
    retrograd::Enable on(retrograd::Options().backend(retrograd::Backend::kSchedule));
    ours = train();
  }
  const retrograd::Stats stats = retrograd::stats();
  retrograd::uninstall();

  bool ok = check(stock.gradients.size() == ours.gradients.size(), "the runs have different numbers of gradients.");
  for (size_t i = 0; ok && i < stock.gradients.size(); ++i) {
    ok = check(torch::equal(stock.gradients[i], ours.gradients[i]), "a gradient differs from the stock engine's.");
  }
  ok &= check(stock.losses == ours.losses, "the losses differ from the stock engine's.");
  ok &= check(ours.losses.back() < 0.5F * ours.losses.front(), "the model did not learn.");
  ok &= check(stats.schedule_calls == kSteps, "not every backward call ran a schedule.");
  ok &= check(stats.hits + stats.misses == kSteps && stats.hits >= kSteps - 2, "the schedule was not found again.");
  if (!ok) return EXIT_FAILURE;
  std::cout << "consumer: " << kSteps << " steps, loss " << ours.losses.front() << " -> " << ours.losses.back()
            << ", gradients equal to the stock engine's; hits " << stats.hits << ", misses " << stats.misses << '\n';
  return EXIT_SUCCESS;
}
