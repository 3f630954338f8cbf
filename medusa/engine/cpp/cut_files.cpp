// A sentence where a mapped file has been cut. To read what is gone is a SIGBUS, which ends the process without
// a word; the embedding of a GGUF file is read from its file at every step.

#include <csignal>
#include <unistd.h>

namespace {

struct sigaction before;

void tell(int, siginfo_t* fault, void*) {
  static const char sentence[] =
      "error: a file that this process reads was cut while it was in use, so it cannot go on; copy or download "
      "the file again, and write files under another name while they are in use\n";
  if (fault->si_code == BUS_ADRERR && write(STDERR_FILENO, sentence, sizeof(sentence) - 1) < 0) {
    _exit(128 + SIGBUS);
  }
  sigaction(SIGBUS, &before, nullptr);  // the access is tried again, and ends as it would have
}

const bool is_told = [] {
  struct sigaction action = {};
  action.sa_sigaction = tell;
  action.sa_flags = SA_SIGINFO;
  return sigaction(SIGBUS, &action, &before) == 0;
}();

}  // namespace
