#include <iostream>
#include <string>
#include <vector>

#include "client/sluicectl/app.h"

int main(int argc, char** argv) {
  return sluice::ctl::RunSluicectl(std::vector<std::string>(argv + 1, argv + argc), std::cout,
                                   std::cerr);
}
