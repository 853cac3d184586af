//! Shows the device's work for two guests: see `demo` in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    guest_tests::guest_tests_demo()
}
