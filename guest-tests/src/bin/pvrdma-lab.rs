//! Runs a command in guests that have RDMA: see `lab` in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    guest_tests::pvrdma_lab()
}
