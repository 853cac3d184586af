//! Tests and measures the device in guests: see the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    guest_tests::guest_tests_suite()
}
